# SPDX-License-Identifier: Apache-2.0
"""The command line without a server: fast help, flags from the config's fields, mistakes without a stack trace."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.support import engine_of
from whalefall.cli.chat import Talk
from whalefall.cli.main import COMMANDS, main
from whalefall.engine.config import EngineConfig, OptionDoc, describe_options
from whalefall.testing.toy_checkpoint import write_toy_checkpoint


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return write_toy_checkpoint(tmp_path / "toy")


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(args)
    said = capsys.readouterr()
    return int(left.value.code or 0), said.out, said.err


def test_help_imports_nothing_heavy() -> None:
    code = "import sys\nfrom whalefall.cli.main import main\ntry: main(['--help'])\nfinally: print('|', *sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    text, _, modules = said.partition("|")
    assert not {"torch", "numpy", "fastapi", "uvicorn", "deepseek_recipe"} & set(modules.split())
    assert all(name in text for name in COMMANDS)


def test_every_field_of_the_config_is_a_flag_of_serve(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, text, _ = run(capsys, "serve", "--help")
    flags = {"--" + option.name.replace("_", "-") for option in describe_options(EngineConfig)} - {"--model"}
    assert code == 0 and {flag for flag in flags if flag not in text} == set()


@pytest.mark.parametrize("args", [("generate", "/nowhere", "--prompt", "x"), ("serve", "/nowhere", "--port", "0"), ("chat", "/nowhere")])
def test_missing_directory_is_one_line(capsys: pytest.CaptureFixture[str], args: tuple[str, ...]) -> None:
    code, _, text = run(capsys, *args)
    assert code == 2 and text.startswith("error: /nowhere: no such directory") and text.count("\n") == 1


def test_wrong_choice_is_refused_with_the_choices(capsys: pytest.CaptureFixture[str], toy: Path) -> None:
    code, _, text = run(capsys, "generate", str(toy), "--prompt", "x", "--dtype", "float7")
    assert code == 2 and "float7" in text and "bfloat16" in text and "Traceback" not in text


FLAGS = [option for option in describe_options(EngineConfig) if option.name not in ("model", "served_model_name")]


@pytest.mark.parametrize("option", FLAGS, ids=lambda option: option.name)
def test_misspelt_flag_is_refused_with_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: OptionDoc
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    flag = "--" + option.name.replace("_", "-")
    code, _, err = run(capsys, "serve", flag + "x", "1")
    assert code == 2
    assert f"No such option: {flag}x" in err and flag in err.replace(flag + "x", "")


@pytest.mark.parametrize("option", [option for option in FLAGS if option.choices], ids=lambda option: option.name)
def test_wrong_choice_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str], toy: Path, option: OptionDoc) -> None:
    assert option.choices is not None
    for right in option.choices:
        wrong = right[:-1] + "x"
        code, _, err = run(capsys, "serve", str(toy), "--" + option.name.replace("_", "-"), wrong)
        assert code == 2
        assert err == f"error: {option.name} is {wrong!r}, must be one of {', '.join(option.choices)}; did you mean {right!r}?\n"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("serve", "--max-num-seqs", "0", "--gpu-memory-utilization", "2"), "max_num_seqs is 0, must be at least 1\nerror: gpu_memory"),
        (("bench", "throughput", "-e", "replay=bounde"), "must be one of exact, bounded; did you mean 'bounded'?"),
        (("bench", "ablate", "-e", "dtyp=float32"), "unknown option 'dtyp'; did you mean 'dtype'?"),
        (("plan", ".", "--gpu", "h20"), "must be one of h100, h200, b200, a100, l40s; did you mean 'h200'?"),
        (("plan", ".", "--weights", "dens"), "did you mean 'dense'?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_values_are_told_before_torch_is_imported(args: tuple[str, ...], words: str) -> None:
    code = f"import sys\nfrom whalefall.cli.main import main\ntry: main({args!r})\nfinally: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (2, "False")
    assert done.stderr.startswith("error: ") and words in done.stderr


def test_wrong_sampling_value_is_refused(capsys: pytest.CaptureFixture[str], toy: Path) -> None:
    code, _, text = run(capsys, "generate", str(toy), "--prompt", "x", "--temperature", "3")
    assert code == 2 and "temperature must be in [0, 2], got 3.0" in text


def test_generate_prints_one_text_per_prompt_and_repeats_it(capsys: pytest.CaptureFixture[str], toy: Path) -> None:
    args = [
        "generate",
        str(toy),
        "--prompt",
        "he",
        "--prompt",
        "ll",
        "--max-tokens",
        "4",
        "--temperature",
        "0",
        "--ignore-eos",
        "--device",
        "cpu",
    ]
    first, second = run(capsys, *args), run(capsys, *args)
    assert first[0] == 0 and first[1] == second[1] and first[1].strip()


async def test_talk_remembers_resets_and_leaves() -> None:
    engine, written = engine_of("deep", "</think>", "Hi"), []
    talk = Talk(engine, system="S", max_tokens=None, temperature=1.0, thinking=True, write=written.append)
    assert await talk.hear("hello") and await talk.hear("again") and await talk.hear("   ")
    assert "".join(written) == "(thinks) deep\n(says) Hi\n" * 2
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant", "user", "assistant"]
    prompt = engine.tokenizer.decode(engine.seen[1][0], skip_special_tokens=False)
    assert "hello" in prompt and "again" in prompt
    assert await talk.hear("/reset") and talk.messages == [{"role": "system", "content": "S"}]
    assert await talk.hear("/what") and not await talk.hear("/quit")
    assert len(engine.seen) == 2


async def test_talk_survives_a_prompt_that_is_too_long() -> None:
    engine, written = engine_of("Hi", max_model_len=60, chat_format="none"), []
    talk = Talk(engine, system=None, max_tokens=5, temperature=1.0, thinking=False, write=written.append)
    engine.generate = _checked(engine)  # type: ignore[method-assign]
    assert await talk.hear("x" * 100)
    assert "limit 60" in "".join(written) and talk.messages == []
    assert await talk.hear("short") and len(talk.messages) == 2


def _checked(engine):  # type: ignore[no-untyped-def]
    """As AsyncLLM does: what cannot run is refused when it is asked for."""
    inner = engine.generate

    async def generate(ids, params, request_id):  # type: ignore[no-untyped-def]
        engine.validate(ids, params)
        async for output in inner(ids, params, request_id):
            yield output

    return generate
