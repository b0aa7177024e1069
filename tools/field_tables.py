"""Write the tables of fields in docs/pages, from the models that read them. Needs what the guard needs.

python -m tools.field_tables            # rewrites what stands between the marks
python -m tools.field_tables --check    # changes nothing; exit status 1 when a table is stale
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from tools.patch_table import ROOT, code, markdown, write
from voxtral_serve.guard.chat import ChatFields
from voxtral_serve.guard.fields import UploadFields
from voxtral_serve.guard.speech.fields import SpeechFields
from voxtral_serve.guard.typed import expected, field_schemas

PAGES = ROOT / "docs/pages"
TABLES: dict[str, dict[str, type[BaseModel]]] = {
    "speech-api.md": {"upload fields": UploadFields, "speech fields": SpeechFields},
    "other-models.md": {"chat fields": ChatFields},
}
LINKED = (ChatFields,)  # models whose table leaves out the fields of their base: the page links to the upload's


def table(model: type[BaseModel]) -> str:
    """Name, values and meaning of each field; those of the model itself before those of its base."""
    own = model.__annotations__
    fields = sorted(model.model_fields.items(), key=lambda named: named[0] not in own)
    if model in LINKED:
        fields = [(name, field) for name, field in fields if name in own]
    values = field_schemas(model)
    rows = [(field.alias or name, field.description or "") for name, field in fields]
    return markdown(("field", "values", "meaning"), [(code(name), expected(values[name]), does) for name, does in rows])


def main(arguments: Sequence[str] | None = None, pages: Path = PAGES) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.field_tables", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 when a table is stale")
    check = parser.parse_args(arguments).check
    status = 0
    for page, models in TABLES.items():
        tables = {marks(what): table(model) for what, model in models.items()}
        status |= write(pages / page, tables, "table of fields", parser.prog, check)
    return status


def marks(what: str) -> tuple[str, str]:
    return f"<!-- {what}: made by tools/field_tables.py -->", f"<!-- /{what} -->"


if __name__ == "__main__":
    sys.exit(main())
