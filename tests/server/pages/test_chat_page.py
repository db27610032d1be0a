# SPDX-License-Identifier: Apache-2.0
"""The chat page in a browser, against a server with a scripted engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.server.pages.conftest import Page, Site, until
from tests.server.support import engine_of
from whalefall.engine import embedded
from whalefall.testing.scripted import ScriptedLLM

pytestmark = pytest.mark.browser

ENTER, ESCAPE, TAB, SHIFT = "\ue007", "\ue00c", "\ue004", "\ue008"
Serve, Visit = Callable[..., Site], Callable[..., Page]
END = "</think>"


def talker(*pieces: str, **more: Any) -> ScriptedLLM:
    """Thinks a little, then says the pieces."""
    return engine_of("Let me think.", END, *pieces, **more)


@pytest.fixture
def endless() -> ScriptedLLM:
    return talker(*[f"word{i} " for i in range(3000)], step_s=0.01)


def prompt_text(engine: ScriptedLLM, index: int = -1) -> str:
    return engine.tokenizer.decode(engine.seen[index][0], skip_special_tokens=False)


def test_answer_appears_while_it_is_made_and_ends_with_its_numbers(serve: Serve, visit: Visit, endless: ScriptedLLM) -> None:
    endless.script = dataclasses.replace(endless.script, pieces=endless.script.pieces[:200])
    endless._token_ids = endless._token_ids[:200]
    site = serve(endless)
    page = visit(site.url)
    page.one("#prompt").send_keys("Count", ENTER)
    page.wait_text(".answer", "word1 ")
    site.hold()
    assert page.all(".turn.running") and page.is_shown("#stop") and not page.is_shown("#send")
    assert "word197" not in page.text(".answer") and "tokens/s" in page.text(".stats")
    site.release()
    page.wait_text(".answer", "word197")
    until(lambda: not page.all(".turn.running"))
    stats = page.text(".stats")
    assert stats.startswith("201 tokens · ") and "tokens/s" in stats and "first token after" in stats and "prompt tokens" in stats
    assert page.texts(".turn.user .text") == ["Count"] and page.texts(".turn .who") == ["whale"]


def test_reasoning_is_folded_and_apart_from_the_answer(serve: Serve, visit: Visit) -> None:
    page = visit(serve(talker("The ", "answer.")).url)
    page.ask("Why?")
    assert page.text(".reasoning summary").startswith("Thought for ")
    assert page.text(".answer") == "The answer." and not page.is_shown(".reasoning .markdown")
    page.click(".reasoning summary")
    assert page.one(".reasoning .markdown").text == "Let me think."


@pytest.mark.parametrize("how", ["escape", "button"])
def test_stop_ends_the_request_in_the_engine_and_keeps_what_was_said(serve: Serve, visit: Visit, endless: ScriptedLLM, how: str) -> None:
    page = visit(serve(endless).url)
    page.one("#prompt").send_keys("Go", ENTER)
    page.wait_text(".answer", "word3")
    if how == "escape":
        page.keys(ESCAPE)
    else:
        page.click("#stop")
    page.wait_text(".stats", "stopped by you")
    until(lambda: len(endless.aborted) == 1 and not endless.open_requests, "the engine to be told")
    assert "word3" in page.text(".answer") and page.focus() == "prompt" and page.is_shown("#send")
    page.one("#prompt").send_keys("Again", ENTER)
    until(lambda: len(endless.seen) == 2)
    assert "word3" in prompt_text(endless)  # the stopped answer is part of the conversation
    page.keys(ESCAPE)
    until(lambda: len(endless.aborted) == 2)


def test_conversations_survive_a_reload_and_stay_apart(serve: Serve, visit: Visit) -> None:
    engine = talker("Yes.")
    page = visit(serve(engine).url)
    page.ask("First question")
    page.ask("More of it")
    page.click("#new")
    assert page.focus() == "prompt" and not page.all(".turn")
    page.ask("Second question")
    assert "First question" not in prompt_text(engine)
    page.driver.refresh()
    assert page.texts("#conversations button") == ["Second question", "First question"]
    assert page.texts(".turn.user .text") == ["Second question"] and page.texts(".answer") == ["Yes."]
    page.click("#conversations li:nth-child(2) button")
    assert page.texts(".turn.user .text") == ["First question", "More of it"] and page.texts(".answer") == ["Yes.", "Yes."]
    assert "first token after" in page.text(".stats")
    page.ask("And now?")
    assert [part in prompt_text(engine) for part in ("First question", "More of it", "And now?", "Second")] == [True, True, True, False]


def test_answer_goes_on_while_another_conversation_is_open(serve: Serve, visit: Visit, endless: ScriptedLLM) -> None:
    page = visit(serve(endless).url)
    page.one("#prompt").send_keys("Long", ENTER)
    page.wait_text(".answer", "word3")
    page.click("#new")
    assert page.is_shown("#send") and page.all("#conversations .busy")
    page.click("#conversations .busy")
    page.wait_text(".answer", "word20")
    page.keys(ESCAPE)
    page.wait_text(".stats", "stopped by you")


def test_answer_cut_off_by_leaving_is_kept_and_says_so(serve: Serve, visit: Visit, endless: ScriptedLLM) -> None:
    page = visit(serve(endless).url)
    page.one("#prompt").send_keys("Long", ENTER)
    page.wait_text(".answer", "word3")
    page.driver.refresh()
    page.wait_text(".stats", "cut off when the page was left")
    assert "word3" in page.text(".answer")
    until(lambda: len(endless.aborted) == 1, "the engine to notice")


def test_rename_and_delete(serve: Serve, visit: Visit) -> None:
    page = visit(serve(talker("Yes.")).url)
    page.ask("Question")
    page.js("document.querySelector('#title').select()")
    page.one("#title").send_keys("A better name", ENTER)
    assert page.focus() == "prompt"
    page.driver.refresh()
    assert page.texts("#conversations button") == ["A better name"]
    page.click("#delete")
    page.keys(ESCAPE)  # changed one's mind
    assert page.texts("#conversations button") == ["A better name"]
    page.click("#delete")
    assert page.text("#confirm-name") == "A better name"
    page.click("#confirm button[value=delete]")
    until(lambda: page.texts("#conversations button") == ["New conversation"])
    page.driver.refresh()
    assert not page.all(".turn") and page.js("return Object.keys(localStorage).filter((key) => key.includes('conversation.'))") == []


def test_export_holds_the_messages_in_the_form_of_the_api(serve: Serve, visit: Visit, downloads: Path) -> None:
    page = visit(serve(talker("**Yes**, it is.")).url)
    page.ask("Is it: so?")
    page.click("#export")
    page.click("#export-as button[value=json]")
    file = downloads / "Is-it-so.json"
    until(file.exists)
    messages = json.loads(until(file.read_text))["messages"]
    assert messages[0] == {"role": "user", "content": "Is it: so?"}
    assert (messages[1]["content"], messages[1]["reasoning_content"]) == ("**Yes**, it is.", "Let me think.")
    page.click("#export")
    page.click("#export-as button[value=md]")
    file = downloads / "Is-it-so.md"
    until(file.exists)
    assert until(file.read_text) == "# Is it: so?\n\n## You\n\nIs it: so?\n\n## Answer\n\n**Yes**, it is.\n"


def test_settings_reach_the_engine_and_the_next_conversation(serve: Serve, visit: Visit) -> None:
    engine = engine_of("Yes.")
    page = visit(serve(engine).url)
    page.click("#settings-toggle")
    for name, value in {"system": "Be brief.", "temperature": "0.3", "top_p": "0.9", "max_tokens": "7", "seed": "5"}.items():
        page.one(f"[name={name}]").send_keys(value)
    page.one("[name=thinking]").send_keys("off")
    page.ask("Hm?")
    page.click("#new")
    page.ask("Hm?")
    for index in (0, 1):
        sampling = engine.seen[index][1]
        assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed) == (0.3, 0.9, 7, 5)
        assert "Be brief." in prompt_text(engine, index) and prompt_text(engine, index).endswith("</think>")
    assert page.text(".answer") == "Yes." and not page.is_shown(".reasoning")


def test_empty_settings_leave_the_choice_to_the_server(serve: Serve, visit: Visit) -> None:
    engine = talker("Yes.")
    page = visit(serve(engine).url)
    page.ask("Hm?")
    sampling = engine.seen[0][1]
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (1.0, 1.0, None) and prompt_text(engine).endswith("<think>")


def test_refused_setting_is_named_and_marked(serve: Serve, visit: Visit) -> None:
    engine = talker("Yes.")
    page = visit(serve(engine).url)
    page.expected_errors = ["400"]
    page.click("#settings-toggle")
    page.one("[name=top_p]").send_keys("3")
    page.ask("Hm?")
    assert "top_p" in page.text(".turn .error") and engine.seen == []
    assert page.one("[name=top_p]").get_attribute("aria-invalid") == "true"
    page.one("[name=top_p]").clear()
    page.click("[data-action=retry]")
    page.wait_text(".answer", "Yes.")
    assert page.texts(".turn.user .text") == ["Hm?"] and not page.is_shown(".turn .error")


def test_fault_in_the_stream_is_shown_and_can_be_tried_again(serve: Serve, visit: Visit) -> None:
    engine = talker("It ", "works.", fails_at=3)
    page = visit(serve(engine).url)
    page.ask("Hm?")
    assert page.text(".answer") == "It" and "scripted fault" in page.text(".turn .error")
    engine.script = dataclasses.replace(engine.script, fails_at=None)
    page.click("[data-action=retry]")
    page.wait_text(".answer", "It works.")
    assert engine.seen[0][0] == engine.seen[1][0] and not page.is_shown(".turn .error")


def test_own_message_can_be_edited_and_the_edit_left(serve: Serve, visit: Visit) -> None:
    engine = talker("Yes.")
    page = visit(serve(engine).url)
    page.ask("Frist")
    page.ask("Second")
    page.click(".turn.user [data-action=edit]")
    assert page.one("#prompt").get_attribute("value") == "Frist"
    page.keys(ESCAPE)
    assert page.texts(".turn.user .text") == ["Frist", "Second"] and page.one("#prompt").get_attribute("value") == ""
    page.click(".turn.user [data-action=edit]")
    page.one("#prompt").clear()
    page.one("#prompt").send_keys("First", ENTER)
    until(lambda: page.texts(".turn.user .text") == ["First"] and page.texts(".answer") == ["Yes."])
    assert "Frist" not in prompt_text(engine) and "Second" not in prompt_text(engine)


def test_key_is_asked_for_when_the_server_wants_one(serve: Serve, visit: Visit) -> None:
    page = visit(serve(talker("Yes."), api_keys=("sesame",)).url)
    page.expected_errors = ["401"]
    for key in ("wrong", "sesame"):
        page.wait_shown("#key")
        assert page.focus() == "key-value"
        page.keys(key, ENTER)
        until(lambda key=key: key == "sesame" or "not accepted" in page.text("#key-problem"))
    page.wait_text("#model", "whale")
    page.driver.refresh()
    page.wait_text("#model", "whale")
    page.ask("Hm?")
    assert page.text(".answer") == "Yes."
    assert page.js("return Object.values(localStorage).some((value) => value.includes('sesame'))") is False


def test_text_of_the_model_never_becomes_markup(serve: Serve, visit: Visit) -> None:
    evil = '<img src=x onerror="window.broken=1"> <script>window.broken=1</script> [go](javascript:window.broken=1) ![i](http://other.host/i.png)'
    page = visit(serve(talker(evil)).url)
    page.ask(evil)
    assert "<script>window.broken=1</script>" in page.text(".answer") and page.texts(".turn.user .text") == [evil]
    assert page.all(".turn img, .turn script, .turn a[href^=javascript]") == []
    assert [link.get_attribute("rel") for link in page.all(".answer a")] == ["noopener noreferrer"]
    assert page.js("return window.broken") is None


def test_embedded_model_says_what_it_is(serve: Serve, visit: Visit) -> None:
    engine = talker("x")
    site = serve(engine)
    page = visit(site.url)
    page.wait_text("#model", "whale")
    assert not page.is_shown("#notice")
    engine.model_name = embedded.NAME
    page.driver.refresh()
    page.wait_text("#notice", embedded.NOTICE)
    assert page.is_shown("#notice")


def test_page_waits_for_a_model_that_loads(serve: Serve, visit: Visit) -> None:
    site = serve(None)
    page = visit(site.url)
    page.wait_text("#state", "still loading")
    site.app.state.door.open(talker("Yes."))
    until(lambda: page.text("#state") == "")
    page.ask("Hm?")
    assert page.text(".answer") == "Yes."


def test_keyboard_alone_is_enough(serve: Serve, visit: Visit, endless: ScriptedLLM) -> None:
    page = visit(serve(endless).url)
    assert page.focus() == "prompt"
    page.keys("one", SHIFT + ENTER, SHIFT, "two")
    assert page.one("#prompt").get_attribute("value") == "one\ntwo"
    page.keys(ENTER)
    page.wait_text(".answer", "word1")
    assert page.texts(".turn.user .text") == ["one\ntwo"] and page.focus() == "prompt"
    page.keys(ESCAPE)
    page.wait_text(".stats", "stopped by you")
    tab_to(page, "settings-toggle")
    page.keys(ENTER)
    assert page.js("return document.activeElement.name") == "system"
    page.keys(ESCAPE)
    assert page.focus() == "settings-toggle" and not page.is_shown("#settings")
    tab_to(page, "delete")
    page.keys(ENTER)
    page.wait_shown("#confirm")
    page.keys(TAB, ENTER)
    until(lambda: not page.all(".turn"))
    assert page.focus() == "prompt"


def tab_to(page: Page, wanted: str) -> None:
    for _ in range(30):
        if page.focus() == wanted:
            return
        page.keys(TAB)
    raise AssertionError(f"the Tab key does not reach {wanted}")


def test_screen_reader_hears_each_block_once_and_no_single_tokens(serve: Serve, visit: Visit) -> None:
    page = visit(serve(talker("One ", "block.\n\n", "Another ", "**block**.\n\n", "- a list")).url)
    page.ask("Hm?")
    assert page.texts("#announcer p") == ["Answering.", "One block.", "Another block.", "a list", "End of the answer."]
    assert page.one("#announcer").get_attribute("aria-live") == "polite" and page.one("#turns").get_attribute("aria-live") == "off"


def test_every_control_has_a_name_and_the_page_its_landmarks(serve: Serve, visit: Visit) -> None:
    page = visit(serve(talker("```py\nx\n```")).url)
    page.ask("Hm?")
    page.click("#settings-toggle")
    nodes = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    seen = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node.get("ignored")]
    controls = [item for item in seen if item[0] in ("button", "link", "textbox", "combobox", "spinbutton", "DisclosureTriangle")]
    assert len(controls) > 15 and [role for role, name in controls if not name] == []
    assert {"main", "navigation", "complementary", "log", "heading"} <= {role for role, _ in seen}
    assert {"Message", "Temperature", "Name of this conversation", "Copy this code"} <= {name for _, name in controls}


def test_colours_follow_the_system_unless_chosen(serve: Serve, visit: Visit) -> None:
    page = visit(serve(talker("x")).url)
    assert brightness(page) > 200
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]})
    assert brightness(page) < 60
    page.one("#theme").send_keys("light")
    until(lambda: brightness(page) > 200)
    page.driver.refresh()
    assert brightness(page) > 200
    page.open("dashboard")
    assert brightness(page) > 200


def brightness(page: Page) -> float:
    colour = page.js("return getComputedStyle(document.documentElement).backgroundColor")
    red, green, blue = (int(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(","))
    return (red + green + blue) / 3


@pytest.mark.parametrize("path", ["", "dashboard"])
def test_narrow_screen_needs_no_sideways_scrolling(serve: Serve, visit: Visit, path: str) -> None:
    page = visit(serve(talker("`" + "x" * 300 + "` and\n\n```\n" + "y" * 300 + "\n```")).url, width=340)
    page.ask("z" * 200)
    if path:
        page.open(path)
        page.wait_text("#health", "live")
    assert page.js("return document.scrollingElement.scrollWidth") <= 340
    assert page.js("return document.querySelector('main').scrollWidth") <= 340


def test_conversations_are_in_a_menu_on_a_narrow_screen(serve: Serve, visit: Visit) -> None:
    page = visit(serve(talker("Yes.")).url, width=340)
    page.ask("Hm?")
    assert not page.is_shown("#sidebar")
    page.click("#menu")
    page.wait_shown("#sidebar")
    assert page.focus() == "new" and page.one("#menu").get_attribute("aria-expanded") == "true"
    page.keys(ESCAPE)
    page.wait_shown("#sidebar", False)
    assert page.focus() == "menu"


def test_copy_says_that_it_has_copied(serve: Serve, visit: Visit) -> None:
    page = visit(serve(talker("```py\nx = 1\n```")).url)
    page.ask("Hm?")
    page.click(".code button")
    page.wait_text(".code button", "Copied")
    page.click("#prompt")
    page.driver.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": "keyDown", "commands": ["paste"]})
    until(lambda: page.one("#prompt").get_attribute("value") == "x = 1", page.one("#prompt").get_attribute("value"))


def test_full_storage_is_said_and_the_answer_still_comes(serve: Serve, visit: Visit) -> None:
    page = visit(serve(talker("Yes.")).url)
    page.js(
        "for (let size = 2 ** 22; size > 0; size = Math.floor(size / 2)) try { localStorage['fill' + size] = 'x'.repeat(size) } catch {}"
    )
    page.ask("Hm?")
    assert "storage is full" in page.text("#state") and page.text(".answer") == "Yes."


def test_damaged_storage_does_no_harm(serve: Serve, visit: Visit) -> None:
    page = visit(serve(talker("Yes.")).url)
    page.js("localStorage['whalefall.conversation.a'] = '{'; localStorage['whalefall.conversation.b'] = '{\"id\": \"b\", \"messages\": 3}'")
    page.js("localStorage['whalefall.settings'] = '7'")
    page.driver.refresh()
    page.ask("Hm?")
    assert page.text(".answer") == "Yes."


def test_two_tabs_see_each_others_conversations(serve: Serve, visit: Visit) -> None:
    page = visit(serve(talker("Yes.")).url)
    page.ask("From the first tab")
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    try:
        page.open()
        page.click("#new")
        page.ask("From the second tab")
    finally:
        page.driver.close()
        page.driver.switch_to.window(first)
    until(lambda: page.texts("#conversations button") == ["From the second tab", "From the first tab"])
    assert page.texts(".turn.user .text") == ["From the first tab"]
