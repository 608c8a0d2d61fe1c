"""The tables of docs/results.md, from the records that are kept here: `python studies/results.py`."""

from pathlib import Path

from gtracer.lab.report.tables import Row
from gtracer.lab.results import Estimate, Results, read
from gtracer.lab.study import load

HERE = Path(__file__).parent
RECORDS = HERE.parent / "records"
# Behind each name the study, and the folder of its records.
TABLES = {
    "Table 2": ("table2", "cifar100/table2"),
    "Beyond the paper": (str(HERE / "cifar100" / "variants.yaml"), "cifar100/variants"),
}
HEADINGS = ("setting", "method", "n", "last epoch", "best epoch", "wrong labels learnt", "the paper")


def table(results: Results) -> str:
    """Markdown; what was not run is left out."""
    rows = [Row.of(result, results) for result in results.all]
    lines = [cells(row) for row in rows if row.n]
    return "\n".join(f"| {' | '.join(line)} |" for line in [HEADINGS, ["---"] * len(HEADINGS), *lines])


def cells(row: Row) -> list[str]:
    numbers = [row.last, row.best, row.memorised]
    return [row.setting, row.method, str(row.n), *map(_cell, numbers), _cell(row.paper)]


def _cell(number: Estimate | None) -> str:
    return "" if number is None else str(number)


def main() -> None:
    for name, (study, folder) in TABLES.items():
        found, problems = read(RECORDS / folder, load(study))
        assert not problems, problems
        print(f"## {name}\n\n{table(found)}\n")


if __name__ == "__main__":
    main()
