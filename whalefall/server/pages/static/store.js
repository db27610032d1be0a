// SPDX-License-Identifier: Apache-2.0
// Conversations and settings in the browser's storage, one entry per conversation, so that two tabs disturb each other little.
//
// conversation: {id, title, is_named, created, updated, settings, messages}
// message: {role, content, reasoning?, reasoning_s?, stats?, error?, ending?}

const PREFIX = "whalefall.conversation.";
const SETTINGS = "whalefall.settings";
const memory = new Map(); // stands in where storage is blocked

export const EMPTY_SETTINGS = { system: "", thinking: "", temperature: "", top_p: "", max_tokens: "", seed: "" };

/** All conversations, the newest first. An entry that is not ours or damaged is left alone. */
export function loadAll() {
  const found = [];
  for (const key of keys()) {
    const conversation = key.startsWith(PREFIX) ? parsed(read(key)) : null;
    if (isConversation(conversation) && PREFIX + conversation.id === key) found.push(settled(conversation));
  }
  return found.sort((a, b) => b.updated - a.updated);
}

export function load(id) {
  const conversation = parsed(read(PREFIX + id));
  return isConversation(conversation) ? settled(conversation) : null;
}

export function create(settings) {
  const now = Date.now();
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "New conversation", is_named: false, created: now, updated: now, settings: { ...EMPTY_SETTINGS, ...settings }, messages: [] };
}

/** Returns null, or why nothing was kept. */
export function save(conversation) {
  return write(PREFIX + conversation.id, JSON.stringify(conversation));
}

export function remove(id) {
  erase(PREFIX + id);
}

/** What the last used settings were: those of the next new conversation. */
export function loadSettings() {
  return { ...EMPTY_SETTINGS, ...parsed(read(SETTINGS)) };
}

export function saveSettings(settings) {
  return write(SETTINGS, JSON.stringify(settings));
}

/** Calls back with the id when another tab has changed or removed a conversation. */
export function onForeignChange(callback) {
  addEventListener("storage", (event) => event.key?.startsWith(PREFIX) && callback(event.key.slice(PREFIX.length)));
}

function isConversation(value) {
  return typeof value?.id === "string" && typeof value.title === "string" && Array.isArray(value.messages) &&
    value.messages.every((message) => typeof message?.content === "string");
}

/** An answer that was under way when its page went away has ended there. */
function settled(conversation) {
  conversation.settings = { ...EMPTY_SETTINGS, ...conversation.settings };
  for (const message of conversation.messages) if (message.ending === "running") message.ending = "left";
  return conversation;
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function keys() {
  try {
    return Object.keys(localStorage);
  } catch {
    return [...memory.keys()];
  }
}

function read(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return memory.get(key) ?? null;
  }
}

function write(key, value) {
  try {
    localStorage.setItem(key, value);
    return null;
  } catch (error) {
    if (error.name === "QuotaExceededError") return "The browser's storage is full: this is not kept. Delete old conversations.";
    memory.set(key, value);
    return "The browser blocks storage: conversations last until you leave this page.";
  }
}

function erase(key) {
  try {
    localStorage.removeItem(key);
  } catch {
    memory.delete(key);
  }
}
