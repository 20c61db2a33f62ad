"""Options of ``daskserve bench``: the server, the load on it, and what is asked of the answer."""

from __future__ import annotations

import click

from daskserve.command_options import options

target_options = options(
    click.option(
        "--url",
        default="http://127.0.0.1:8000",
        show_default=True,
        help="Of the server, with or without /v1.",
    ),
    click.option("--model", default="", help="As the server calls it  [default: the one it has]"),
    click.option(
        "--endpoint",
        type=click.Choice(("completions", "chat")),
        default="completions",
        show_default=True,
        help="/v1/completions or /v1/chat/completions; answers are streamed.",
    ),
    click.option(
        "--api-key-file",
        metavar="PATH",
        help="The first line is the key. Without it the environment variable OPENAI_API_KEY.",
    ),
    click.option("--ca-file", metavar="PATH", help="PEM of your own authority, for https."),
    click.option(
        "--ready-timeout",
        type=click.FloatRange(0),
        default=0.0,
        metavar="SECONDS",
        help="Wait so long for a server that starts  [default: not at all]",
    ),
)
load_options = options(
    click.option(
        "--rate",
        type=float,
        help="Requests/s; inf sends all at once  [default: that of the file]",
    ),
    click.option(
        "--requests",
        type=click.IntRange(1),
        help="How many  [default: 200, or all of the file]",
    ),
    click.option(
        "--duration",
        type=click.FloatRange(0, min_open=True),
        metavar="SECONDS",
        help="Instead of --requests: those that arrive in so long.",
    ),
    click.option(
        "--arrivals",
        type=click.Choice(("poisson", "gamma", "constant", "workload")),
        help="workload: those of the file  [default: workload if it has times, else poisson]",
    ),
    click.option(
        "--burstiness",
        type=float,
        help="Gamma arrivals, as in vLLM: 1 is Poisson, less is burstier.",
    ),
    click.option(
        "--workload",
        "workload_path",
        metavar="FILE",
        help="Lengths and arrivals of a trace, as daskserve plan reads it.",
    ),
    click.option("--prompt-tokens", metavar="N[-M]", help="Instead of a file  [default: 512]"),
    click.option("--output-tokens", metavar="N[-M]", help="Tokens to ask for  [default: 128]"),
    click.option(
        "--prompt-file",
        metavar="PATH",
        help="Prompts, one a line in turn: text, or .jsonl with prompt or messages. "
        "Otherwise random tokens; for --endpoint chat random words, each about a token.",
    ),
    click.option(
        "--token-ids",
        metavar="LOW-HIGH",
        default="100-250",
        show_default=True,
        help="Random tokens are of these ids: give the model's own range for realistic experts.",
    ),
    click.option(
        "--ignore-eos/--stop-at-eos",
        default=True,
        show_default=True,
        help="Always ask for all output tokens (vLLM and daskserve know it).",
    ),
    click.option("--temperature", type=float, default=0.0, help="Of the sampling  [default: 0]"),
    click.option("--seed", type=click.IntRange(0), default=0, help="Same seed, same load."),
    click.option(
        "--timeout",
        type=click.FloatRange(0, min_open=True),
        default=600.0,
        show_default=True,
        metavar="SECONDS",
        help="An answer that takes longer failed.",
    ),
)
answer_options = options(
    click.option(
        "--attainment",
        type=float,
        default=0.9,
        show_default=True,
        help="Share of requests that must meet both limits.",
    ),
    click.option(
        "--slo-scales",
        metavar="A,B,...",
        help="With limits: attainment at these multiples of them  [default: 0.5 to 3]",
    ),
    click.option(
        "--find-goodput",
        is_flag=True,
        help="Try rates from --rate (default: 1) for the highest that meets the limits, "
        "--duration (default: 60) seconds each.",
    ),
    click.option("--max-rate", type=float, help="With --find-goodput: try no higher rate."),
    click.option(
        "--tolerance",
        type=float,
        help="With --find-goodput: relative width at which it ends  [default: 0.05]",
    ),
    click.option(
        "--instances",
        type=click.IntRange(1),
        help="For figures per instance  [default: what a daskserve server says]",
    ),
    click.option(
        "-o",
        "--output",
        metavar="FILE",
        help="Write every request as NetCDF (.nc); daskserve plan --workload reads it.",
    ),
    click.option(
        "--recorded",
        multiple=True,
        metavar="FILE",
        help="No server: the figures of an earlier --output, under other limits. Several files "
        "are added up: clients that ran side by side, each with a share of the rate and an own "
        "seed.",
    ),
    click.option("--quiet", is_flag=True, help="No progress."),
)
