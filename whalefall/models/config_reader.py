# SPDX-License-Identifier: Apache-2.0
"""ConfigReader: reads a model's config.json key by key and collects every problem instead of stopping at the first.

Each problem is one line: file, key, what was found, what is allowed. A value that fails is replaced by a harmless stand-in so that
reading goes on; `are_sound` tells a later check whether the keys that it compares were read well. The caller ends with `finish`, which
reports unknown keys, and raises `ConfigError(reader.problems)` if there are any.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

REQUIRED: Final = object()
"""Default of a key that has no sensible default."""

HARMLESS_KEYS = frozenset(
    {
        *("_attn_implementation", "_name_or_path", "attn_implementation", "auto_map", "id2label", "label2id", "problem_type"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "task_specific_params", "torch_dtype"),
        *("add_cross_attention", "chunk_size_feed_forward", "is_encoder_decoder", "pretraining_tp", "transformers_version", "use_cache"),
        *("aux_loss_alpha", "initializer_range", "router_aux_loss_coef", "router_jitter_noise", "seq_aux"),
    }
)
"""Keys that Hugging Face tools write and that do not change what an inference engine computes."""


class ConfigReader:
    """One JSON object of a config file. Sections share the list of problems of their root."""

    def __init__(self, values: Any, file: str, *, path: str = "", parent: ConfigReader | None = None) -> None:
        self.file = file
        self._path = path
        self.problems: list[str] = parent.problems if parent else []
        """Every problem found so far, one line each."""
        self.defaults_used: list[str] = parent.defaults_used if parent else []
        """One line per missing key that was given its default."""
        self._known: set[str] = set()
        self._bad: set[str] = set()
        if not isinstance(values, Mapping):
            self.problems.append(f"{file}: {path.rstrip('.') or 'the whole file'}: found {_shown(values)}, allowed: an object")
            values = {}
            self._usable = False
        else:
            self._usable = True
        self._values: Mapping[str, Any] = values

    def has(self, key: str) -> bool:
        return key in self._values

    def has_any(self, prefix: str) -> bool:
        return any(key.startswith(prefix) for key in self._values)

    def are_sound(self, *keys: str) -> bool:
        """True when every one of these keys was read without a problem."""
        return self._usable and not self._bad.intersection(keys)

    def fail(self, key: str, found: str, allowed: str) -> None:
        """Record a problem with a key; `found` is a phrase such as "missing" or "found 3"."""
        self._bad.add(key)
        if self._usable:  # a section that is no object has been reported once; its keys are not missing
            self.problems.append(f"{self.file}: {self._path}{key}: {found}, allowed: {allowed}")

    def integer(
        self, key: str, *, low: int = 0, high: int | None = None, multiple: int = 1, default: Any = REQUIRED, say: bool = True
    ) -> int:
        allowed = _range_words("an integer", low, high) + (f" and a multiple of {multiple}" if multiple > 1 else "")
        value = self._take(key, default, allowed, say)
        good = isinstance(value, int) and not isinstance(value, bool)
        if good and low <= value and (high is None or value <= high) and value % multiple == 0:
            return int(value)
        self._reject(key, value, allowed)
        return max(low, 1) * multiple

    def number(self, key: str, *, low: float = 0.0, above: bool = False, default: Any = REQUIRED) -> float:
        """A finite number of at least `low`, or strictly above it."""
        allowed = f"a number {'above' if above else 'of at least'} {low:g}"
        value = self._take(key, default, allowed)
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if good and (value > low if above else value >= low):
            return float(value)
        self._reject(key, value, allowed)
        return max(low, 1.0)

    def optional_integer(self, key: str) -> int | None:
        """An integer of at least 0, or None where the key is absent."""
        self._known.add(key)
        return self.integer(key) if self.has(key) else None

    def integers(
        self, key: str, *, low: int = 0, high: int | None = None, at_least: int = 0, default: Any = REQUIRED, say: bool = True
    ) -> tuple[int, ...]:
        """A list of at least `at_least` integers."""
        allowed = f"a list of {f'at least {at_least} ' if at_least else ''}integers, each {_range_words('', low, high).strip()}"
        value = self._take(key, default, allowed, say)
        good = isinstance(value, Sequence) and not isinstance(value, str) and len(value) >= at_least
        if good and all(isinstance(v, int) and not isinstance(v, bool) and low <= v and (high is None or v <= high) for v in value):
            return tuple(value)
        self._reject(key, value, allowed)
        return ()

    def choice(self, key: str, *allowed_values: Any, default: Any = REQUIRED, say: bool = True) -> Any:
        """One of the values this version supports, of the same type."""
        allowed = " or ".join(json.dumps(v, ensure_ascii=False) for v in allowed_values)
        value = self._take(key, default, allowed, say)
        for supported in allowed_values:
            if value == supported and isinstance(value, bool) == isinstance(supported, bool):
                return supported
        self._reject(key, value, allowed)
        return allowed_values[0]

    def section(self, key: str) -> ConfigReader:
        """A nested object that must be there."""
        value = self._take(key, REQUIRED, "an object")
        if value is REQUIRED:
            self._bad.add(key)
            empty = ConfigReader({}, self.file, path=f"{self._path}{key}.", parent=self)
            empty._usable = False
            return empty
        made = ConfigReader(value, self.file, path=f"{self._path}{key}.", parent=self)
        if not made._usable:
            self._bad.add(key)
        return made

    def optional_section(self, key: str) -> ConfigReader | None:
        self._known.add(key)
        return self.section(key) if key in self._values else None

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Report every key that nobody asked for: a setting that is ignored in silence would change what the model computes."""
        known = self._known | HARMLESS_KEYS | set(harmless)
        for key, value in self._values.items():
            if key not in known:
                near = difflib.get_close_matches(key, self._known, n=1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                self.fail(key, f"found {_shown(value)}", f"only keys that this version understands{hint}")

    def is_list(self, key: str) -> bool:
        return isinstance(self._values.get(key), list | tuple)

    def _take(self, key: str, default: Any, allowed: str, say: bool = True) -> Any:
        self._known.add(key)
        if key in self._values:
            return self._values[key]
        if default is REQUIRED:
            self.fail(key, "missing", allowed)
        elif self._usable and say:
            self.defaults_used.append(f"{self.file}: {self._path}{key}: missing, using {json.dumps(default)}")
        return default

    def _reject(self, key: str, value: Any, allowed: str) -> None:
        if value is not REQUIRED:  # a missing key was reported by _take
            self.fail(key, f"found {_shown(value)}", allowed)


def _range_words(noun: str, low: int, high: int | None) -> str:
    if high is None:
        return f"{noun} of at least {low}"
    return f"{noun} from {low} to {high}"


def _shown(value: Any) -> str:
    """The value as it stands in the file, shortened, with its kind where JSON's notation may be misread."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    text = text if len(text) <= 80 else text[:77] + "..."
    return f"the string {text}" if isinstance(value, str) else text
