// SPDX-License-Identifier: Apache-2.0
// The chat page: what happens when. `open` is the conversation on the page; `runs` are the answers under way, of any conversation.

import { hasKey, servedModel, setKey, streamChat } from "./api.js";
import { Run } from "./run.js";
import * as store from "./store.js";
import { turnElement } from "./turns.js";

const at = (id) => document.getElementById(id);
const [scroller, turns, prompt, state, announcer] = ["scroller", "turns", "prompt", "state", "announcer"].map(at);
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];

let conversations = store.loadAll();
let open = null;
let model = null;
let edited = null; // the turn whose message is being written anew
const runs = new Map(); // conversation id -> Run

// --- conversations ---

function show(conversation) {
  if (edited) endEdit("");
  open = conversation;
  at("title").value = conversation.title;
  turns.replaceChildren(...conversation.messages.map(element));
  at("empty").hidden = conversation.messages.length > 0;
  showSettings(conversation.settings);
  showList();
  showRunning();
  say("");
  toEnd();
}

function element(message) {
  return turnElement(message, message.role === "user" ? "You" : message.model ?? model?.id ?? "Answer");
}

function showList() {
  const kept = conversations.includes(open) ? conversations : [open, ...conversations];
  const rows = kept.map((conversation) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = conversation.title;
    button.dataset.id = conversation.id;
    if (conversation === open) button.setAttribute("aria-current", "true");
    if (runs.has(conversation.id)) {
      button.classList.add("busy");
      button.setAttribute("aria-label", `${conversation.title}, answering`);
    }
    const row = document.createElement("li");
    row.append(button);
    return row;
  });
  const focused = at("conversations").contains(document.activeElement) ? document.activeElement.dataset.id : null;
  at("conversations").replaceChildren(...rows);
  if (focused) at("conversations").querySelector(`[data-id="${CSS.escape(focused)}"]`)?.focus();
}

/** A conversation enters the list and the storage with its first message or its own name. */
function keep(conversation) {
  conversation.updated = Date.now();
  conversations = [conversation, ...conversations.filter((other) => other !== conversation)];
  const problem = store.save(conversation);
  if (problem) say(problem);
}

function startNew() {
  show(store.create(store.loadSettings()));
  closeDrawers();
  prompt.focus();
}

async function deleteOpen() {
  at("confirm-name").textContent = open.title;
  if ((await answerOf(at("confirm"))) !== "delete") return;
  const gone = open;
  runs.get(gone.id)?.drop();
  runs.delete(gone.id);
  store.remove(gone.id);
  conversations = conversations.filter((conversation) => conversation !== gone);
  if (conversations.length) show(conversations[0]);
  else startNew();
  prompt.focus();
}

function rename() {
  const title = at("title").value.trim();
  at("title").value = title || open.title;
  if (!title || title === open.title) return;
  Object.assign(open, { title, is_named: true });
  keep(open);
  showList();
}

async function exportOpen() {
  const kind = await answerOf(at("export-as"));
  if (!kind) return;
  const text = kind === "json" ? JSON.stringify({ ...open, messages: open.messages.map(plainMessage), model: model?.id }, null, 2) : asMarkdown(open);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind === "json" ? "application/json" : "text/markdown" }));
  link.download = `${open.title.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 60) || "conversation"}.${kind}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const plainMessage = ({ role, content, reasoning, ...rest }) => ({ role, content, ...(reasoning ? { reasoning_content: reasoning } : {}), ...rest });

function asMarkdown({ title, settings, messages }) {
  const parts = [`# ${title}`, ...(settings.system ? [`**System:** ${settings.system}`] : [])];
  for (const { role, content } of messages) parts.push(role === "user" ? "## You" : "## Answer", content);
  return `${parts.join("\n\n")}\n`;
}

// --- asking ---

function send() {
  const content = prompt.value.trim();
  if (!content || runs.has(open.id)) return;
  if (!readSettings()) return;
  if (edited !== null) cutFrom(edited);
  endEdit("");
  add({ role: "user", content });
  if (!open.is_named && open.messages.length === 1) {
    open.title = content.split("\n")[0].slice(0, 60);
    at("title").value = open.title;
  }
  ask();
}

function add(message) {
  open.messages.push(message);
  turns.append(element(message));
  at("empty").hidden = true;
}

function ask() {
  const conversation = open;
  const body = requestBody(conversation);
  const message = { role: "assistant", content: "", ending: "running", model: model?.id };
  add(message);
  announcer.replaceChildren();
  const run = new Run(message, streamChat, body, {
    onMoved: () => followRun(conversation, run),
    onSave: () => keep(conversation),
    onEnd: (error) => endRun(conversation, run, error),
  });
  runs.set(conversation.id, run);
  keep(conversation);
  showList();
  showRunning();
  say("");
  announce("Answering.");
  toEnd();
  run.start();
}

function requestBody({ settings, messages }) {
  const body = { model: model?.id, messages: [] };
  if (settings.system.trim()) body.messages.push({ role: "system", content: settings.system });
  for (const message of messages) {
    if (message.role === "assistant" && message.error && !message.content) continue; // never became an answer
    body.messages.push({
      role: message.role,
      content: message.content,
      ...(message.reasoning ? { reasoning_content: message.reasoning } : {}), // the server decides what of it counts
    });
  }
  if (settings.thinking) body.thinking = { type: settings.thinking === "off" ? "disabled" : "enabled" };
  if (settings.thinking && settings.thinking !== "off") body.reasoning_effort = settings.thinking;
  for (const name of NUMBERS) if (settings[name] !== "") body[name] = Number(settings[name]);
  return body;
}

function followRun(conversation, run) {
  if (open !== conversation) return;
  const turn = turns.lastElementChild;
  const is_at_end = isAtEnd();
  turn.follow();
  if (is_at_end) toEnd();
  speak(turn, run, turn.blocks - 1);
}

/** A screen reader hears each block of the answer once, when it is complete. */
function speak(turn, run, num_complete) {
  for (; run.num_spoken < num_complete; run.num_spoken++) {
    announce(turn.answer.children[run.num_spoken].textContent);
  }
}

/** For screen readers only; the page shows the same by its look. */
function announce(text) {
  const line = document.createElement("p");
  line.textContent = text;
  announcer.append(line);
  while (announcer.children.length > 8) announcer.firstElementChild.remove();
}

function endRun(conversation, run, error) {
  runs.delete(conversation.id);
  keep(conversation);
  if (open === conversation) {
    followRun(conversation, run);
    speak(turns.lastElementChild, run, turns.lastElementChild.blocks);
    showRunning();
    if (!error) announce(run.message.ending === "stopped" ? "Stopped." : "End of the answer.");
    if (error?.param) markField(error.param.split(/[.[]/)[0]);
  }
  showList();
  if (error?.status === 401) askForKey();
}

function showRunning() {
  const is_running = runs.has(open.id);
  const had_focus = document.activeElement === at("stop");
  at("send").hidden = is_running;
  at("stop").hidden = !is_running;
  if (had_focus && !is_running) prompt.focus();
}

function stop() {
  runs.get(open.id)?.stop();
}

/** Ask again for the last answer. */
function retry(turn) {
  if (runs.has(open.id) || !readSettings()) return;
  endEdit("");
  cutFrom(turn);
  ask();
  prompt.focus();
}

/** Take a message of one's own back into the field; it and what came after it go when the new one is sent. */
function edit(turn) {
  if (runs.has(open.id)) return;
  edited = turn;
  prompt.value = open.messages[placeOf(turn)].content;
  say("Sending replaces this message and all after it. Esc leaves them as they are.");
  fit();
  prompt.focus();
}

function endEdit(text) {
  edited = null;
  prompt.value = text;
  fit();
}

const placeOf = (turn) => [...turns.children].indexOf(turn);

function cutFrom(turn) {
  const index = placeOf(turn);
  open.messages.length = index;
  while (turns.children.length > index) turns.lastElementChild.remove();
  at("empty").hidden = index > 0;
}

// --- settings ---

const fields = at("parameters").elements;

function showSettings(settings) {
  for (const field of fields) {
    field.value = settings[field.name];
    field.removeAttribute("aria-invalid");
  }
}

/** Returns whether every field can be read; one that cannot is shown instead of silently left out. */
function readSettings() {
  const wrong = [...fields].find((field) => field.validity.badInput);
  if (wrong) {
    markField(wrong.name);
    say("This setting is not a number.");
    wrong.focus();
    return false;
  }
  for (const field of fields) open.settings[field.name] = field.value;
  return true;
}

function markField(name) {
  if (!Object.hasOwn(store.EMPTY_SETTINGS, name)) return;
  openSettings(true);
  fields[name].setAttribute("aria-invalid", "true");
}

function settingsChanged(event) {
  event.target.removeAttribute("aria-invalid");
  if (!readSettings()) return;
  store.saveSettings(open.settings);
  if (open.messages.length) keep(open);
}

function openSettings(is_open) {
  at("settings").hidden = !is_open;
  at("settings-toggle").setAttribute("aria-expanded", String(is_open));
}

// --- the server ---

async function meetServer() {
  try {
    model = await servedModel();
  } catch (error) {
    if (error.status === 401) {
      at("change-key").hidden = false;
      await askForKey();
    } else say(error.message);
    return;
  }
  at("change-key").hidden = !hasKey();
  at("model").textContent = model.id;
  at("notice").hidden = !model.notice;
  at("notice").textContent = model.notice ? `Note: ${model.notice}.` : "";
  if (model.max_model_len === null) {
    say("The model is still loading…");
    setTimeout(meetServer, 1000);
  } else if (state.textContent.startsWith("The ")) say("");
}

async function askForKey() {
  if (at("key").open) return;
  at("key-problem").textContent = hasKey() ? "The key in use was not accepted." : "It is kept in this tab until you close it.";
  at("key-value").value = "";
  if ((await answerOf(at("key"))) !== "use") return say("The server asks for an API key: see Settings.");
  setKey(at("key-value").value);
  at("key-value").value = "";
  prompt.focus();
  await meetServer();
}

// --- the page ---

/** Shows a dialog and resolves with the value of the button that closed it; "" for Escape. */
function answerOf(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  dialog.querySelector("[data-first]").focus();
  return new Promise((resolve) => dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true }));
}

function say(text) {
  if (state.textContent !== text) state.textContent = text;
}

function isAtEnd() {
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 60;
}

function toEnd() {
  scroller.scrollTop = scroller.scrollHeight;
}

/** The message field grows with its text; its greatest height is the style sheet's. */
function fit() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
}

function openMenu(is_open) {
  at("sidebar").classList.toggle("open", is_open);
  at("menu").setAttribute("aria-expanded", String(is_open));
  if (is_open) at("new").focus();
}

function closeDrawers() {
  openMenu(false);
  if (matchMedia("(max-width: 66rem)").matches) openSettings(false);
}

async function copy(button) {
  const is_code = button.dataset.copy === "code";
  const text = is_code ? button.closest(".code").querySelector("code").textContent : open.messages[placeOf(button.closest(".turn"))].content;
  const is_done = await toClipboard(text);
  button.textContent = is_done ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without https the clipboard is closed; the older way still works.
    const area = document.createElement("textarea");
    const focused = document.activeElement;
    area.value = text;
    area.className = "hidden-text";
    document.body.append(area);
    area.select();
    const is_done = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return is_done;
  }
}

function onEscape(event) {
  if (document.querySelector("dialog[open]")) return;
  if (at("sidebar").classList.contains("open")) {
    openMenu(false);
    at("menu").focus();
  } else if (runs.has(open.id)) stop();
  else if (edited) {
    endEdit("");
    say("");
  }
  else if (at("settings").contains(event.target)) {
    openSettings(false);
    at("settings-toggle").focus();
  }
}

function onForeignChange(id) {
  const known = conversations.find((conversation) => conversation.id === id);
  if (runs.has(id)) return; // this tab is the one that writes
  const loaded = store.load(id);
  conversations = conversations.filter((conversation) => conversation !== known);
  if (loaded) conversations = [loaded, ...conversations].sort((a, b) => b.updated - a.updated);
  if (known === open && loaded) show(loaded);
  else showList();
}

at("new").addEventListener("click", startNew);
at("delete").addEventListener("click", deleteOpen);
at("export").addEventListener("click", exportOpen);
at("title").addEventListener("change", rename);
at("title").addEventListener("keydown", (event) => event.key === "Enter" && prompt.focus());
at("stop").addEventListener("click", stop);
at("latest").addEventListener("click", () => { toEnd(); prompt.focus(); });
at("menu").addEventListener("click", () => openMenu(!at("sidebar").classList.contains("open")));
at("settings-toggle").addEventListener("click", () => {
  openSettings(at("settings").hidden);
  if (!at("settings").hidden) fields.system.focus();
});
at("settings-close").addEventListener("click", () => { openSettings(false); at("settings-toggle").focus(); });
at("change-key").addEventListener("click", askForKey);
at("key-cancel").addEventListener("click", () => at("key").close(""));
at("parameters").addEventListener("change", settingsChanged);
at("parameters").addEventListener("submit", (event) => event.preventDefault());
at("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
at("conversations").addEventListener("click", ({ target }) => {
  const chosen = conversations.find((conversation) => conversation.id === target.dataset.id);
  if (!chosen) return;
  show(chosen);
  closeDrawers();
  prompt.focus();
});
turns.addEventListener("click", ({ target }) => {
  const turn = target.closest(".turn");
  if (target.dataset.copy) copy(target);
  if (target.dataset.action === "retry") retry(turn);
  if (target.dataset.action === "edit") edit(turn);
});
prompt.addEventListener("input", fit);
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
scroller.addEventListener("scroll", () => (at("latest").hidden = isAtEnd()));
document.addEventListener("keydown", (event) => event.key === "Escape" && !event.isComposing && onEscape(event));
document.addEventListener("click", ({ target }) => {
  if (at("sidebar").classList.contains("open") && !at("sidebar").contains(target) && target !== at("menu")) openMenu(false);
});
addEventListener("pagehide", () => { for (const run of runs.values()) run.leave(); });
addEventListener("pageshow", (event) => event.persisted && location.reload()); // a page that was put aside has lost its answers
store.onForeignChange(onForeignChange);

show(conversations[0] ?? store.create(store.loadSettings()));
prompt.focus();
meetServer();
