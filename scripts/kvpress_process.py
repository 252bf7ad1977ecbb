"""kvpress in a process of its own, since it needs an older transformers than octavo."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from octavo.scripts import kvpress_kept
from octavo.scripts.refusal import ConfigError

ENDING_S = 10.0  # that it has to end by itself

WAY_OUT = (
    "kvpress pins an older transformers than octavo's, so it has an environment of its own: python -m venv KVPRESS && "
    "KVPRESS/bin/pip install kvpress; then kvpress_python=KVPRESS/bin/python"
)


def check_python(python: str | None) -> str:
    """The program that is to have kvpress, if there is one.

    Raises:
        ConfigError: there is none.
    """
    if python is None:
        raise ConfigError(f"kvpress_python has no value; {WAY_OUT}")
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        raise ConfigError(f"kvpress_python={python}: no such program; {WAY_OUT}")
    return python


@dataclass(frozen=True)
class Press:
    """A press of kvpress that keeps so many ``tokens`` of a prompt in each KV head, or so many in each layer."""

    press: str
    arguments: dict[str, Any]
    tokens: int | list[int]


class Kvpress:
    """kvpress on a model; ``kept_tokens`` asks it. Used as a context.

    Attributes:
        versions: of kvpress, torch and transformers there.

    Raises:
        ConfigError: ``python`` has no kvpress that loads the model.
    """

    def __init__(self, python: str, model_path: str, dtype: str, device: str, log: Path) -> None:
        self._python, self._log = python, log
        # -P and no PYTHONPATH: what lies beside the program, or is this process's own, is not that environment's.
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, "-P", kvpress_kept.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
            )
        try:
            self.versions: dict[str, str] = self._ask({"model": model_path, "dtype": dtype, "device": device})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Kvpress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def kept(self, ids: Sequence[int], presses: Sequence[Press]) -> list[list[list[list[int]]]]:
        """By press, layer and KV head, the positions in ``ids`` that are kept, ascending.

        Raises:
            ConfigError: a press cannot do it; the message is its own.
        """
        answer = self._ask({"ids": list(ids), "presses": [asdict(press) for press in presses]})
        if "error" in answer:
            names = ", ".join(dict.fromkeys(press.press for press in presses))
            raise ConfigError(f"kvpress ({names}): {answer['error']}")
        kept: list[list[list[list[int]]]] = answer["kept"]
        return kept

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()  # the end of its requests, upon which it tidies up
        try:
            self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()
            last = said[-1] if said else "it said nothing"
            raise ConfigError(f"{self._python} ended: {last} (all of it: {self._log}); {WAY_OUT}")
        answer: dict[str, Any] = json.loads(line)
        return answer
