"""``thalweg``: the command line. Its verbs are in race, plan and check, as plain functions too."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

import thalweg
from thalweg.errors import OptimError
from thalweg.show.arguments import suggest
from thalweg.show.extras import MissingExtra, extra

with extra("cli"):
    import click

VERBS = {
    "race": "Which optimizer learns fastest? Run them side by side and draw what happened.",
    "plan": "What will it cost? State, temporaries and bytes moved for a model, before anything is allocated.",
    "check": "Does an optimizer, yours or another's, keep what users rely on? More than a hundred small checks.",
}
#: Exit codes beside 0: it could not be done; it was asked for wrongly, as click has it; Ctrl-C.
FAILED, MISUSED, INTERRUPTED = 1, 2, 130


class Verbs(click.Group):
    """The verbs, each loaded when it is asked for: ``thalweg --help`` waits for no framework."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in VERBS:
            ctx.fail(f"there is no verb {cmd_name!r}: {suggest(cmd_name, VERBS)}")
        command: click.Command = importlib.import_module(f"thalweg.{cmd_name}.command").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


@click.group(
    cls=Verbs,
    subcommand_metavar="VERB [ARGS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(thalweg.__version__, prog_name="thalweg")
def command() -> None:
    """Optimizers for training large neural networks: choose one by looking.

    \b
    thalweg race                      all optimizers on handwritten digits, in a minute or two
    thalweg plan gpt2                 what each would keep in memory and move in a step
    thalweg check torch.optim.AdamW   what users rely on, checked for any optimizer
    thalweg VERB --help               options and examples
    """


def run(arguments: Sequence[str] | None = None) -> int:
    """The exit code of a command. A user's mistake gives one sentence, without a traceback."""
    try:
        code = command.main(None if arguments is None else list(arguments), prog_name="thalweg", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as nothing:
        sys.stdout.write(nothing.format_message() + "\n")
        return MISUSED
    except click.UsageError as error:
        asked = error.ctx.command_path if error.ctx else "thalweg"
        return report(f"{error.format_message()} ({asked} --help says more)", MISUSED)
    except click.ClickException as error:
        return report(error.format_message(), error.exit_code)
    except (OptimError, MissingExtra) as error:
        return report(str(error), FAILED)
    except (KeyboardInterrupt, click.Abort):
        return report("stopped", INTERRUPTED)
    except BrokenPipeError:  # the reader of the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return report(f"{error.filename or 'the system'}: {error.strerror or error}", FAILED)
    return code if isinstance(code, int) else 0


def report(message: str, code: int) -> int:
    sys.stderr.write(f"thalweg: {message}\n")
    return code
