"""Options that several verbs have."""

from __future__ import annotations

from thalweg.show.extras import extra

with extra("cli"):
    import click

option_option = click.option(
    "--option",
    "options",
    multiple=True,
    metavar="NAME=VALUE",
    help="Set an option for all that have it, or kron.NAME=VALUE for one; may be repeated.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print everything as JSON instead of a table.")
