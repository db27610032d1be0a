// SPDX-License-Identifier: Apache-2.0
// One message on the page: its elements, and how they follow the message while it grows.

import { renderMarkdown } from "./markdown.js";

const ENDINGS = {
  length: "reached the token limit",
  abort: "ended by the server",
  stopped: "stopped by you",
  left: "cut off when the page was left",
};

/** The element of a message; its `follow()` draws the message as it is now. */
export function turnElement(message, speaker) {
  const turn = make("article", `turn ${message.role}`);
  turn.setAttribute("aria-label", speaker);
  return message.role === "user" ? userTurn(turn, message) : answerTurn(turn, message, speaker);
}

function userTurn(turn, message) {
  const text = make("div", "text", message.content);
  turn.append(text, footer(button("Edit", "edit"), button("Copy", "turn")));
  turn.follow = () => {};
  return turn;
}

function answerTurn(turn, message, speaker) {
  const reasoning = make("details", "reasoning");
  const summary = make("summary");
  const thought = make("div", "markdown");
  const answer = make("div", "markdown answer");
  const error = make("p", "error");
  const stats = make("span", "stats");
  const copy = button("Copy", "turn");
  const retry = button("Try again", "retry");
  reasoning.append(summary, thought);
  error.setAttribute("role", "alert");
  turn.append(make("div", "who", speaker), reasoning, answer, error, footer(copy, retry, stats));
  turn.follow = () => {
    const is_running = message.ending === "running";
    turn.classList.toggle("running", is_running);
    reasoning.hidden = !message.reasoning;
    summary.textContent = thoughtTitle(message, is_running);
    renderMarkdown(thought, message.reasoning ?? "");
    turn.blocks = renderMarkdown(answer, message.content);
    turn.answer = answer;
    answer.hidden = !is_running && message.content === "";
    error.hidden = !message.error;
    if (error.textContent !== (message.error ?? "")) error.textContent = message.error ?? "";
    copy.hidden = is_running || message.content === "";
    retry.hidden = is_running;
    stats.textContent = statsText(message);
  };
  turn.follow();
  return turn;
}

function thoughtTitle(message, is_running) {
  if (is_running && message.content === "") return "Thinking…";
  return message.reasoning_s === undefined ? "Thoughts" : `Thought for ${seconds(message.reasoning_s)}`;
}

/** "128 tokens · 34.1 tokens/s · first token after 0.32 s", with what is known. */
export function statsText({ stats, ending }) {
  const parts = [];
  if (stats?.tokens) {
    parts.push(`${count(stats.tokens, "token")}`);
    const rate = tokensPerSecond(stats);
    if (rate !== null) parts.push(`${rate.toLocaleString("en", { maximumSignificantDigits: 3 })} tokens/s`);
  }
  if (stats?.ttft_s !== undefined) parts.push(`first token after ${seconds(stats.ttft_s)}`);
  if (stats?.prompt_tokens && ending !== "running") {
    parts.push(`${count(stats.prompt_tokens, "prompt token")}${stats.cached_tokens ? `, ${stats.cached_tokens.toLocaleString("en")} from the cache` : ""}`);
  }
  if (ENDINGS[ending]) parts.push(ENDINGS[ending]);
  return parts.join(" · ");
}

/** Over the time between the first and the last token, which is how decode speed is defined; null when there is none. */
function tokensPerSecond({ tokens, decode_s }) {
  return tokens > 1 && decode_s > 0 ? (tokens - 1) / decode_s : null;
}

const seconds = (value) => `${value < 10 ? value.toFixed(2) : value.toFixed(1)} s`;
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

function footer(...children) {
  const made = make("footer");
  made.append(...children);
  return made;
}

function button(label, action) {
  const made = make("button", "quiet", label);
  made.type = "button";
  made.dataset[action === "turn" ? "copy" : "action"] = action;
  return made;
}

function make(name, className = "", text = "") {
  const made = document.createElement(name);
  made.className = className;
  made.textContent = text;
  return made;
}
