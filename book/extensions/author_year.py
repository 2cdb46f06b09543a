"""Sphinx extension: the bibliography's labels are authors and year, as the citations in the text are."""

from collections.abc import Iterable, Iterator
from typing import Any

from pybtex.database import Entry
from pybtex.plugin import register_plugin
from pybtex.style.formatting.plain import Style as PlainStyle
from pybtex.style.labels import BaseLabelStyle
from sphinx.application import Sphinx


def author_year(entry: Entry) -> str:
    """Label of one entry: "Press, 2017", "Press and Wolf, 2017" or "Dao et al., 2022"."""
    people = [" ".join((*p.prelast_names, *p.last_names)) for p in entry.persons.get("author", [])]
    people = [person.strip("{}") for person in people] or [entry.key]
    if len(people) == 2 and people[1] != "others":
        names = " and ".join(people)
    else:
        names = people[0] if len(people) == 1 else f"{people[0]} et al."
    return f"{names}, {entry.fields.get('year', 'n.d.')}"


class AuthorYearLabels(BaseLabelStyle):
    def format_labels(self, sorted_entries: Iterable[Entry]) -> Iterator[str]:
        return (author_year(entry) for entry in sorted_entries)


class AuthorYearStyle(PlainStyle):
    default_label_style = AuthorYearLabels


def setup(app: Sphinx) -> dict[str, Any]:
    register_plugin("pybtex.style.formatting", "author_year", AuthorYearStyle)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
