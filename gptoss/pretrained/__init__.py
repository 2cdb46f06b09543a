"""Trained models that come with the package, and how one is put into that form."""

from gptoss.pretrained.shipped import export_pretrained, list_pretrained, load_pretrained

__all__ = ["export_pretrained", "list_pretrained", "load_pretrained"]
