"""`transaxle serve` serves a checkpoint as a hub until it is interrupted."""

from __future__ import annotations

import sys
from typing import Any

import click

from transaxle import verbs
from transaxle.cli.command import Command, complete_with, options_of, targets, with_screen
from transaxle.cli.convert import print_plan_notes
from transaxle.cli.refusals import Stopped
from transaxle.cli.screen import Screen
from transaxle.engine.plan.conversion import HUB
from transaxle.engine.wording import plural, size
from transaxle.serving import HubServer, is_loopback

_LABEL = HUB[1]
"""The one kind of service that there is, and the layout of its models."""


@click.command(
    "serve",
    cls=Command,
    examples=(
        ("transaxle serve run/step-1000/ --as hf", "then, with HF_ENDPOINT set:  hf download step-1000"),
        ("transaxle serve DeepSeek-V3/ --decode bf16 --name my/V3-bf16", "dequantized, under a name of its own"),
        ("transaxle serve Qwen3-8B/ --merge adapter/ --port 8800", "with a LoRA adapter merged"),
        ("transaxle serve run/step-1000/ --host 0.0.0.0 --token-file TOKEN", "for other machines"),
    ),
    help="""Serve a checkpoint as a hub, without a copy on disk.

    PATH is a folder, a file or a URL. Every program that downloads models from huggingface.co (vLLM, transformers, hf
    download) takes the model from here if HF_ENDPOINT is set as printed. The files are those that convert would write,
    byte for byte, and are computed while they are sent; only the manifest, transaxle.json, is missing. Accepts the
    options of convert for the source and for the numbers. Every reason against the conversion is listed before the
    server starts. If the source changes later, each request is refused.

    The server listens on the loopback and answers GET and HEAD only. With --host, other machines can reach it: each
    request then needs a token, which is that of --token-file or a new one that is printed. HTTP does not encrypt: on a
    network that you do not trust, leave out --host and forward the port with ssh.

    The server runs until Ctrl-C.""",
)
@click.argument("src", metavar="PATH", type=click.Path(readable=False))
@click.option(
    "--as", "service", type=click.Choice([_LABEL]), default=_LABEL, help="The service to answer like: a hub of models."
)
@click.option(
    "--to",
    metavar="TARGET",
    default=_LABEL,
    show_default=True,
    shell_complete=complete_with(targets),
    help="FORMAT, FORMAT:DIALECT, or DIALECT alone, of the files.",
)
@options_of("serve")
@with_screen
def serve_command(screen: Screen, src: str, service: str, to: str, options: dict[str, Any]) -> int:
    """Serve a checkpoint as a hub."""
    screen.state("nothing was served")
    quiet = screen.quiet or screen.as_json
    with verbs.serve(src, to, log=None if quiet else screen.note, watch=screen, **options) as hub:
        screen.state("")
        _print_start(screen, service, hub, generated=options["token_file"] is None)
        sys.stdout.flush()
        try:
            hub.wait()
        except Stopped:
            raise
        except KeyboardInterrupt:
            if not quiet:
                screen.note("closed")
    return 0


def _print_start(screen: Screen, service: str, hub: HubServer, *, generated: bool) -> None:
    """Print what is served, and how programs find it.

    Args:
        screen: where to print.
        service: the kind of service.
        hub: the running server.
        generated: whether the token, if there is one, is new, so that it must be printed.
    """
    plan, sizes = hub.plan, {name: file.size for name, file in hub.files.items()}
    if screen.as_json:
        facts = {"as": service, "url": hub.url, "name": hub.name, "commit": hub.commit, "token": None}
        screen.document(facts | ({"token": hub.token} if generated and hub.token else {}) | {"files": sizes})
        return
    before = f"{plan.source_format}:{plan.from_dialect or 'own names'}"
    amount = f"{size(sum(sizes.values()))} in {plural(len(sizes), 'file')}"
    head = [plan.family or "", f"{before} -> {plan.format}:{plan.dialect}", plural(len(plan.tensors), "tensor"), amount]
    screen.line((" · ".join(text for text in head if text), "bold"))
    print_plan_notes(screen, plan)
    screen.line(
        f"serving {hub.name} at commit {hub.commit[:8]} until Ctrl-C; in the shell of the program that loads it:"
    )
    screen.line((f"  export HF_ENDPOINT={hub.url}", "green"))
    if hub.token:
        screen.line((f"  export HF_TOKEN={hub.token if generated else '...'}", "green"))
    if not is_loopback(hub.host):
        screen.line("  other machines can connect; HTTP does not encrypt what is sent")
