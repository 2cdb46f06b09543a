"""From text to batches: corpora, tokenizers, shards, order, retrieval examples (chapter 13).

`prepare`, the function, is imported from its module of the same name.
"""

from gptoss.data.corpora import Corpus, open_corpus
from gptoss.data.default import default_dataset
from gptoss.data.documents import Document
from gptoss.data.loader import Batches, PretrainDataset, batches
from gptoss.data.manifest import Manifest, read_manifest, verify_shards
from gptoss.data.order import permute, window_at
from gptoss.data.prepare import PreparedDataset
from gptoss.data.retrieval import RetrievalDataset, insert_retrieval
from gptoss.data.shards import ShardWriter
from gptoss.data.tokenizers import Tokenizer, train_tokenizer

__all__ = [
    "Batches",
    "Corpus",
    "Document",
    "Manifest",
    "PreparedDataset",
    "PretrainDataset",
    "RetrievalDataset",
    "ShardWriter",
    "Tokenizer",
    "batches",
    "default_dataset",
    "insert_retrieval",
    "open_corpus",
    "permute",
    "read_manifest",
    "train_tokenizer",
    "verify_shards",
    "window_at",
]
