# SPDX-License-Identifier: Apache-2.0
"""Checks of a conversation before the codec sees it: a refusal names the index and the field, and says what would be right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from whalefall.core.errors import RequestError

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
"""`developer` is read as `system`, as newer OpenAI clients mean it."""
_IMAGE_PARTS = ("image", "image_url", "input_image")
_PASSIVE_ITEMS = ("web_search_call", "file_search_call", "code_interpreter_call", "mcp_list_tools")
"""Items that hosted tools leave in a history; they say nothing to this model and are left out of the prompt."""
_ITEMS = ("message", "reasoning", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output", *_PASSIVE_ITEMS)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Check the shape of a messages list; `developer` becomes `system`. Raises RequestError naming index and field."""
    if not isinstance(messages, list | tuple):
        got = "missing" if messages is None else f"got {short(messages)}"
        raise RequestError(f"messages must be a list of messages ({got})", param="messages")
    if not messages:
        raise RequestError("messages is empty: at least one message is needed", param="messages")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Any, place: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{place} must be an object with role and content, got {short(message)}", param=place)
    role = message.get("role")
    if role not in ROLES:
        raise RequestError(f"{place}.role must be one of {', '.join(ROLES)}, got {short(role)}", param=f"{place}.role")
    _check_content(message, role, f"{place}.content")
    if role == "assistant" and message.get("reasoning_content") is None and isinstance(message.get("reasoning"), str):
        message = {**message, "reasoning_content": message["reasoning"]}  # some clients send it back under its other name
    return {**message, "role": "system" if role == "developer" else role}


def _check_content(message: Mapping[str, Any], role: str, place: str) -> None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and role == "assistant" and message.get("tool_calls")):
        return
    if not isinstance(content, list):
        rule = "a string or a list of text parts" + ("; null only beside tool_calls" if role == "assistant" else "")
        raise RequestError(f"{place} must be {rule}, got {short(content)}", param=place)
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in _IMAGE_PARTS:
            raise RequestError(f"image input is not supported by this server yet ({place}[{index}])", param="messages")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f'{place}[{index}] must be {{"type": "text", "text": "..."}}, got {short(part)}', param=f"{place}[{index}]")


def check_items(items: Any) -> None:
    """Check the input of a Responses body for what the codec would pass over in silence."""
    if isinstance(items, str) or not isinstance(items, list):
        return  # the codec itself has a word for anything that is not a list
    for index, item in enumerate(items):
        place = f"input[{index}]"
        if not isinstance(item, Mapping):
            raise RequestError(f"{place} must be an object, got {short(item)}", param=place)
        kind = item.get("type", "message")
        if kind == "item_reference":
            raise RequestError(f"{place}: item references are not supported; send the item, or use previous_response_id", param=place)
        if kind not in _ITEMS:
            raise RequestError(f"{place}.type must be one of {', '.join(_ITEMS)}, got {short(kind)}", param=f"{place}.type")
        role = item.get("role")
        if kind == "message" and role not in ("user", "assistant", "system", "developer"):
            raise RequestError(f"{place}.role must be one of user, assistant, system, developer, got {short(role)}", param=f"{place}.role")
        for part_index, part in enumerate(item["content"] if isinstance(item.get("content"), list) else ()):
            if isinstance(part, Mapping) and part.get("type") in ("input_image", "input_file"):
                raise RequestError(
                    f"image and file input is not supported by this server yet ({place}.content[{part_index}])", param="input"
                )


def check_blocks(messages: Any) -> list[dict[str, Any]]:
    """Check the messages of a Messages body; blocks that say nothing here are left out, text documents become text."""
    if not isinstance(messages, list):
        got = "missing" if messages is None else f"got {short(messages)}"
        raise RequestError(f"messages must be a list of messages ({got})", param="messages")
    checked = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{place} must be an object with role and content, got {short(message)}", param=place)
        if message.get("role") not in ("user", "assistant", "system"):
            text = f"{place}.role must be one of user, assistant, system, got {short(message.get('role'))}"
            raise RequestError(text, param=f"{place}.role")
        content = message.get("content")
        if not isinstance(content, str | list):
            raise RequestError(f"{place}.content must be a string or a list of blocks, got {short(content)}", param=f"{place}.content")
        if isinstance(content, list):
            content = [kept for b, block in enumerate(content) if (kept := _check_block(block, f"{place}.content[{b}]")) is not None]
        checked.append({**message, "content": content})
    return checked


def _check_block(block: Any, place: str) -> Any:
    if not isinstance(block, Mapping):
        raise RequestError(f"{place} must be an object with a type, got {short(block)}", param=place)
    kind = block.get("type")
    if kind == "redacted_thinking":
        return None  # another vendor's sealed reasoning; no use here, but no reason to refuse the conversation
    if kind == "document":
        source = block.get("source")
        if isinstance(source, Mapping) and source.get("type") == "text" and isinstance(source.get("data"), str):
            return {"type": "text", "text": source["data"]}
        raise RequestError(f"only plain text documents are supported ({place})", param="messages")
    inner = block.get("content")
    for part in [block, *(inner if isinstance(inner, list) else ())]:
        if isinstance(part, Mapping) and part.get("type") == "image":
            raise RequestError(f"image input is not supported by this server yet ({place})", param="messages")
    if kind == "tool_result" and inner is not None and not isinstance(inner, str | list):
        raise RequestError(f"{place}.content must be a string or a list of blocks, got {short(inner)}", param=f"{place}.content")
    return block


def template_thinking(kwargs: Any) -> bool | None:
    """Clients of other engines switch thinking through chat_template_kwargs; both spellings count."""
    if kwargs is None:
        return None
    if not isinstance(kwargs, Mapping):
        raise RequestError(f"chat_template_kwargs must be an object, got {short(kwargs)}", param="chat_template_kwargs")
    chosen = kwargs.get("thinking", kwargs.get("enable_thinking"))
    if chosen is not None and not isinstance(chosen, bool):
        text = f"chat_template_kwargs.thinking must be true or false, got {short(chosen)}"
        raise RequestError(text, param="chat_template_kwargs.thinking")
    return chosen


def short(value: Any) -> str:
    """A value as it may stand in a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
