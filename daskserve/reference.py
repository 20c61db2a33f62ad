"""Everything that can be set: ``python -m daskserve.reference > docs/configuration.md``.

Settings come from ``daskserve.yaml`` and its models, engine options from ``EngineConfig``, commands
from click; a test compares what is committed with what this prints.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

import click
import yaml

from daskserve.cli import main
from daskserve.config import _DEFAULTS_FILE, Settings
from daskserve.core.instance import EngineConfig

HEAD = """# Configuration

Made by `python -m daskserve.reference > docs/configuration.md`; change the code, not this file.

- [Settings](#settings): limits and waiting times, through Dask's configuration
- [Environment](#environment): where models are cached, API keys
- [Engine](#engine): `EngineConfig`, in Python
- [Commands](#commands): every option of `daskserve`

## Settings

They stand under `daskserve:` in Dask's configuration: in a file such as
`~/.config/dask/daskserve.yaml`, as `dask.config.set({"daskserve.batch.max-in-flight": 100})`, or in
the environment, two underscores for a dot: `DASK_DASKSERVE__BATCH__MAX_IN_FLIGHT=100`. An unknown
key is an error that names the nearest valid one. A name that ends in `-s` is in seconds.
"""
ENVIRONMENT = """## Environment

| variable | what it is |
|---|---|
| `DASKSERVE_CACHE` | models, compiled kernels and profiles; default `~/.cache/daskserve` |
| `DASKSERVE_SMOLLM2_WHEEL` | a copy of the default model's wheel, where there is no network |
| `DASKSERVE_API_KEYS` | keys of `daskserve serve`, separated by commas |
| `DASKSERVE_API_KEY` | the key that `daskserve dashboard` shows a server |
| `OPENAI_API_KEY` | the key that `daskserve bench` shows a server, without `--api-key-file` |
| `DASK_DASKSERVE__...` | any of the settings above |
"""
LIMITS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


def reference() -> str:
    """The whole page, Markdown."""
    parts = [HEAD, *_settings(), ENVIRONMENT, _engine(), "## Commands\n", *_commands()]
    return "\n".join(parts)


def _settings() -> Iterator[str]:
    defaults = yaml.safe_load(_DEFAULTS_FILE.read_text(encoding="utf-8"))["daskserve"]
    comments = yaml_comments(_DEFAULTS_FILE.read_text(encoding="utf-8"))
    for section, info in Settings.model_fields.items():
        model: Any = info.annotation
        yield f"### daskserve.{section}\n\n{_about(model)}\n"
        rows = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
        for name, field in model.model_fields.items():
            key = name.replace("_", "-")
            value = f"`{json.dumps(defaults[section][key])}`"
            cells = (f"`{key}`", value, _allowed(field), comments[f"{section}.{key}"])
            rows.append(_row(cells))
        yield "\n".join(rows) + "\n"


def yaml_comments(text: str) -> dict[str, str]:
    """``section.key`` to its comment; lines that are only a comment go on with the one above."""
    found: dict[str, str] = {}
    section = key = ""
    for line in text.splitlines():
        if match := re.fullmatch(r"  (\S+):\s*(#.*)?", line):
            section, key = match[1], ""
        elif match := re.fullmatch(r"    (\S+): [^#]*#\s*(.*)", line):
            key = f"{section}.{match[1]}"
            found[key] = match[2]
        elif key and (match := re.fullmatch(r"\s+#\s*(.*)", line)):
            found[key] += f" {match[1]}"
    return found


def _about(model: type) -> str:
    """The model's docstring without its name."""
    text = inspect.getdoc(model) or ""
    text = text.partition(": ")[2]
    return text[:1].upper() + text[1:]


def _allowed(field: Any) -> str:
    kind = str(getattr(field.annotation, "__name__", field.annotation))
    kind = kind.replace(" | None", " or null").replace("NoneType", "null")
    bounds = [
        f"{words} {getattr(item, name)}"
        for item in field.metadata
        for name, words in LIMITS.items()
        if hasattr(item, name)
    ]
    return ", ".join([kind, *bounds])


def _engine() -> str:
    """The parameters of EngineConfig, from its docstring."""
    kinds = get_type_hints(EngineConfig)
    meanings = dict(_parameters(inspect.getdoc(EngineConfig) or ""))
    rows = ["## Engine\n", "`EngineConfig`, for `Service.local` and `Service.attach`.\n"]
    rows += ["| field | type | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(EngineConfig):
        kind = kinds[field.name]
        named = kind.__name__ if isinstance(kind, type) else str(kind)
        cells = (f"`{field.name}`", named, f"`{field.default!r}`", meanings.get(field.name, ""))
        rows.append(_row(cells))
    return "\n".join(rows) + "\n"


def _parameters(docstring: str) -> Iterator[tuple[str, str]]:
    """Names and meanings of a numpydoc section; names that share one line share the meaning."""
    section = docstring.partition("Parameters\n----------\n")[2]
    for block in re.findall(r"^(\S.*)\n((?:    .*\n?)+)", section, re.MULTILINE):
        meaning = " ".join(block[1].split()).replace("``", "`")
        for name in block[0].split(", "):
            yield name, meaning


def _commands() -> Iterator[str]:
    for name in sorted(main.commands):
        command = main.commands[name]
        about = inspect.cleandoc(command.help or "").replace("\b\n", "")
        arguments = [one for one in command.params if isinstance(one, click.Argument)]
        options = [one for one in command.params if isinstance(one, click.Option)]
        usage = " ".join(["daskserve", name, *(_argument(one) for one in arguments)])
        yield f"### daskserve {name}\n\n```text\n{usage}\n\n{about}\n```\n"
        if options:
            rows = [_row((f"`{_name(one)}`", _meaning(one))) for one in options]
            yield "\n".join(["| option | meaning |", "|---|---|", *rows]) + "\n"


def _argument(argument: click.Argument) -> str:
    name = (argument.metavar or (argument.name or "").upper()).strip("[]")
    return name if argument.required else f"[{name}]"


def _name(option: click.Option) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    if option.is_flag:
        return names
    kind = option.type
    value = "/".join(kind.choices) if isinstance(kind, click.Choice) else kind.name.upper()
    return f"{names} {option.metavar or value.removesuffix(' RANGE')}"


def _meaning(option: click.Option) -> str:
    text = " ".join((option.help or "").split())
    if option.required:
        text += " Required."
    if option.show_default and option.default is not None:
        text += f" [default: {option.default}]"
    return text


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(reference(), end="")
