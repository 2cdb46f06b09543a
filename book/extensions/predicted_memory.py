"""Sphinx extension: the directive `{predicted-memory}` computes the GiB that settings are predicted to take, one on GPUs.

Its argument is a configuration, and each line of its body is `settings | what they cost | label of the section to read`.
Settings are those of `--set`, with "on 8 GPUs" behind them where there are more than one; they add up from line to line.
The prediction is the trainer's own, for CUDA. A line that does not hold is an error, so it fails `make book`.
"""

import re
from typing import Any

from docutils import nodes
from evidence_tables import code, paragraph, table
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from gptoss.config import load_config
from gptoss.training.memory import predict_run_memory
from gptoss.training.plan import plan_batches, sequences_per_step


def predicted_gib(config: str, settings: list[str], gpus: int = 1) -> float:
    """Peak of a step in GiB, for each of so many GPUs.

    Raises:
        ValueError: a setting that does not exist, another step than the configuration's, or one that so many GPUs cannot
            share.
    """
    run, begun = load_config(config, settings), load_config(config)
    sequences = sequences_per_step(run.training)
    if sequences != sequences_per_step(begun.training):
        raise ValueError(
            f"{' '.join(settings)}: {sequences} sequences a step, not those of {config}"
        )
    assert run.training.micro_batch_size != "auto", "it depends on the card"
    cut = plan_batches(run.training, run.model.max_seq_len, gpus)
    memory = predict_run_memory(
        run.model,
        run.training,
        cut.micro_batch,
        accumulation=cut.accumulation,
        world_size=gpus,
        device="cuda",
    )
    return memory.gib


class PredictedMemory(SphinxDirective):
    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        self.env.note_reread()  # the prediction is code, whose changes Sphinx does not see
        settings: list[str] = []
        rows = []
        for line in self.content:
            change, cost, label = (part.strip() for part in line.split("|"))
            new = re.findall(r"\w+\.\w+=\S+", change)
            settings += new
            gpus = re.search(r"on (\d+) GPUs", change)
            try:
                gib = predicted_gib(self.arguments[0], settings, int(gpus[1]) if gpus else 1)
            except ValueError as error:
                raise self.error(str(error)) from error
            shown = [node for setting in new for node in (code(setting), nodes.Text(" "))]
            rest = re.sub(r"\w+\.\w+=\S+", "", change).strip()
            rows.append(
                [
                    paragraph(*shown, nodes.Text(rest)),
                    round(gib, 1),
                    cost,
                    paragraph(*self.section(label)),
                ]
            )
        heads = ("set", "GiB, predicted", "what it costs", "read")
        return [table(heads, rows, ["predicted"])]

    def section(self, label: str) -> list[nodes.Node]:
        if not label:
            return []
        where = {"refdomain": "std", "reftype": "numref", "reftarget": label}
        title = nodes.literal("", "Section %s", classes=["xref", "std", "std-numref"])
        return [
            addnodes.pending_xref(
                "", title, refexplicit=True, refwarn=True, refdoc=self.env.docname, **where
            )
        ]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("predicted-memory", PredictedMemory)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
