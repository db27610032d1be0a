// SPDX-License-Identifier: Apache-2.0
// Markdown to elements. Text reaches the page as text nodes only, never as HTML; links lead to http, https and mailto, images are not
// loaded. Every scan is linear in the text, since an answer is drawn again and again while it grows.

const MAX_DEPTH = 12; // of lists and quotes inside each other; deeper ones stay text
const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:( {1,4})(?=\S)(.*)|[ \t]*)$/;
const QUOTE = /^ {0,3}> ?/;
const ESCAPABLE = "\\`*_{}#+-.!|~<>"; // not brackets: \( and \[ begin formulas, which stay as they are

/** Draw `text` in `container`. Blocks that have not changed since the last call keep their elements. Returns the number of blocks. */
export function renderMarkdown(container, text) {
  const blocks = parse(text.replaceAll("\r\n", "\n").replaceAll("\t", "    ").split("\n"), 0);
  const old = container.drawn ?? [];
  let same = 0;
  while (same < blocks.length && same < old.length && blocks[same].source === old[same].source) same++;
  for (let i = same; i < blocks.length; i++) {
    const now = container.children[i];
    if (now && blocks[i].kind === "code" && old[i].kind === "code" && blocks[i].language === old[i].language) {
      now.querySelector("code").textContent = blocks[i].body; // a growing listing keeps its place and its button
    } else if (now) now.replaceWith(element(blocks[i]));
    else container.append(element(blocks[i]));
  }
  while (container.children.length > blocks.length) container.lastElementChild.remove();
  container.drawn = blocks;
  return blocks.length;
}

function parse(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at++;
      continue;
    }
    const [block, end] = fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? quote(lines, at, depth) ??
      list(lines, at, depth) ?? table(lines, at) ?? paragraph(lines, at);
    block.source = lines.slice(at, end).join("\n");
    blocks.push(block);
    at = end;
  }
  return blocks;
}

function fence(lines, at) {
  const open = FENCE.exec(lines[at]);
  if (!open) return null;
  const [, marks, info] = open;
  const indent = lines[at].length - lines[at].trimStart().length;
  let end = at + 1;
  while (end < lines.length && !isClosing(lines[end], marks)) end++;
  const body = lines.slice(at + 1, end).map((line) => line.slice(Math.min(indent, line.length - line.trimStart().length)));
  return [{ kind: "code", language: info.trim().split(/\s/)[0], body: body.join("\n") }, Math.min(end + 1, lines.length)];
}

function isClosing(line, marks) {
  const text = line.trim();
  return text.length >= marks.length && text === marks[0].repeat(text.length);
}

function heading(lines, at) {
  const found = HEADING.exec(lines[at]);
  return found && [{ kind: "heading", level: found[1].length, text: found[2].trim() }, at + 1];
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? [{ kind: "rule" }, at + 1] : null;
}

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at]) || depth >= MAX_DEPTH) return null;
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end++;
  return [{ kind: "quote", blocks: parse(lines.slice(at, end).map((line) => line.replace(QUOTE, "")), depth + 1) }, end];
}

function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first || depth >= MAX_DEPTH) return null;
  const kind = listKind(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (!item || listKind(item[2]) !== kind || RULE.test(lines[end])) break;
    const width = item[1].length + item[2].length + (item[3]?.length ?? 1);
    const content = [item[4] ?? ""];
    for (end++; end < lines.length; end++) {
      const line = lines[end];
      const indent = line.length - line.trimStart().length;
      if (line.trim() === "") {
        // A blank line belongs to the list only if something of the list follows it.
        const next = lines.slice(end + 1, end + 3).find((following) => following.trim() !== "");
        if (next === undefined || !(next.startsWith(" ".repeat(Math.min(width, 2))) || ITEM.test(next))) break;
      } else if (indent < Math.min(width, 2)) break;
      content.push(line.slice(Math.min(indent, width)));
    }
    items.push(parse(content, depth + 1));
    while (end < lines.length && lines[end].trim() === "" && ITEM.exec(lines[end + 1] ?? "")) end++;
  }
  return [{ kind: "list", is_ordered: kind !== "bullet", start: parseInt(first[2], 10), items }, end];
}

const listKind = (marker) => (/\d/.test(marker) ? marker.at(-1) : "bullet");

function table(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("|")) return null;
  const head = cells(lines[at]);
  const marks = cells(lines[at + 1]);
  if (head.length !== marks.length || !marks.every((mark) => /^:?-+:?$/.test(mark))) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end++;
  return [{ kind: "table", head, rows: lines.slice(at + 2, end).map((line) => cells(line).slice(0, head.length)) }, end];
}

function cells(line) {
  const text = line.trim();
  const parts = text.replaceAll("\\|", "\u0000").split("|").map((part) => part.replaceAll("\u0000", "|").trim());
  return parts.slice(text.startsWith("|") ? 1 : 0, text.endsWith("|") && parts.length > 1 ? -1 : undefined);
}

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() !== "" && !startsBlock(lines[end])) end++;
  return [{ kind: "paragraph", text: lines.slice(at, end).map((line) => line.trim()).join("\n") }, end];
}

const startsBlock = (line) => [FENCE, HEADING, RULE, QUOTE].some((start) => start.test(line)) || ITEM.exec(line)?.[4] !== undefined;

function element(block) {
  switch (block.kind) {
    case "code": return listing(block);
    case "heading": return filled(`h${block.level}`, inline(block.text));
    case "rule": return document.createElement("hr");
    case "quote": return filled("blockquote", block.blocks.map(element));
    case "table": return grid(block);
    case "list": {
      const made = filled(block.is_ordered ? "ol" : "ul", block.items.map(listItem));
      if (block.is_ordered && block.start !== 1) made.start = block.start;
      return made;
    }
    default: return filled("p", inline(block.text));
  }
}

/** A lone paragraph needs no element of its own. */
function listItem(blocks) {
  return filled("li", blocks.flatMap((block) => (block.kind === "paragraph" && block === blocks[0] ? inline(block.text) : [element(block)])));
}

function listing({ language, body }) {
  const copy = filled("button", ["Copy"]);
  copy.type = "button";
  copy.className = "quiet";
  copy.dataset.copy = "code";
  copy.setAttribute("aria-label", "Copy this code");
  const pre = filled("pre", [filled("code", [body])]);
  pre.tabIndex = 0; // long lines scroll by keyboard too
  const box = filled("div", [filled("div", [filled("span", [language || "text"]), copy]), pre]);
  box.className = "code";
  return box;
}

function grid({ head, rows }) {
  const heads = head.map((text) => Object.assign(filled("th", inline(text)), { scope: "col" }));
  const body = rows.map((row) => filled("tr", row.map((text) => filled("td", inline(text)))));
  const box = filled("div", [filled("table", [filled("thead", [filled("tr", heads)]), filled("tbody", body)])]);
  box.className = "table";
  box.tabIndex = 0;
  return box;
}

function filled(name, children) {
  const made = document.createElement(name);
  for (const child of children) made.append(child);
  return made;
}

/** Code spans, links, emphasis. Returns text and elements. */
function inline(text) {
  const emphasis = new Emphasis();
  const brackets = matchBrackets(text);
  const unclosed = new Set(); // lengths of backtick runs that nothing closes any more
  let plain = "";
  let at = 0;
  const put = (node, end) => {
    emphasis.add(plain);
    plain = "";
    emphasis.add(node);
    at = end;
  };
  while (at < text.length) {
    const letter = text[at];
    const found = letter === "`" ? codeSpan(text, at, unclosed)
      : letter === "[" ? link(text, at, brackets, false)
      : letter === "!" && text[at + 1] === "[" ? link(text, at + 1, brackets, true)
      : letter === "<" || letter === "h" ? bareLink(text, at)
      : null;
    if (found) put(...found);
    else if (letter === "\\" && ESCAPABLE.includes(text[at + 1] ?? "?")) {
      plain += text[at + 1];
      at += 2;
    } else if (letter === "`") {
      const length = runLength(text, at);
      plain += text.slice(at, at + length);
      at += length;
    } else if (letter === "*" || letter === "_" || letter === "~") {
      const length = runLength(text, at);
      emphasis.add(plain);
      plain = "";
      emphasis.mark(letter, length, text[at - 1] ?? " ", text[at + length] ?? " ");
      at += length;
    } else {
      plain += letter;
      at++;
    }
  }
  emphasis.add(plain);
  return emphasis.finish();
}

function runLength(text, at) {
  let end = at;
  while (text[end] === text[at]) end++;
  return end - at;
}

function codeSpan(text, at, unclosed) {
  const length = runLength(text, at);
  if (unclosed.has(length)) return null;
  for (let next = text.indexOf("`", at + length); next >= 0; ) {
    const run = runLength(text, next);
    if (run === length) return [filled("code", [unpadded(text.slice(at + length, next).replaceAll("\n", " "))]), next + run];
    next = text.indexOf("`", next + run);
  }
  unclosed.add(length);
  return null;
}

/** One space on each side lets a code span begin or end with a backtick. */
const unpadded = (code) => (code.startsWith(" ") && code.endsWith(" ") && code.trim() !== "" ? code.slice(1, -1) : code);

/** Where the bracket opened at each place closes. */
function matchBrackets(text) {
  const open = [];
  const closes = new Map();
  for (let i = 0; i < text.length; i++) {
    if (text[i] === "[") open.push(i);
    else if (text[i] === "]" && open.length) closes.set(open.pop(), i);
  }
  return closes;
}

function link(text, at, brackets, is_image) {
  const close = brackets.get(at);
  if (close === undefined || text[close + 1] !== "(") return null;
  const end = text.slice(close + 2, close + 2050).search(/[)\n]/);
  if (end < 0 || text[close + 2 + end] !== ")") return null;
  const target = text.slice(close + 2, close + 2 + end).trim().split(/\s+["']/)[0].replace(/^<|>$/g, "");
  const label = text.slice(at + 1, close);
  const made = anchor(target, is_image ? `image: ${label || target}` : label || target);
  return made && [made, close + 3 + end];
}

function bareLink(text, at) {
  const is_bracketed = text[at] === "<";
  const start = is_bracketed ? at + 1 : at;
  if (!text.startsWith("http://", start) && !text.startsWith("https://", start)) return null;
  if (!is_bracketed && /\w/.test(text[at - 1] ?? "")) return null;
  const [address] = /^[^\s<>"'`*]{0,2000}/.exec(text.slice(start, start + 2000));
  const target = is_bracketed ? address : address.replace(/[.,;:!?)\]]{1,9}$/, "");
  const end = start + target.length;
  if (is_bracketed && text[end] !== ">") return null;
  const made = anchor(target, target);
  return made && [made, end + (is_bracketed ? 1 : 0)];
}

/** A link to the outside, or null when the target is not one that may be followed. */
function anchor(target, label) {
  if (!/^(https?:\/\/|mailto:)/i.test(target) || !URL.canParse(target)) return null;
  const made = filled("a", [label]);
  made.href = target;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

/** Nested emphasis: a stack of openings, the lowest of which is the line itself. An opening that nothing closes becomes text again. */
class Emphasis {
  constructor() {
    this.frames = [{ letter: "", length: 0, children: [] }];
    this.counts = { "*": 0, _: 0, "~": 0 };
  }

  add(node) {
    if (node !== "") this.frames.at(-1).children.push(node);
  }

  mark(letter, length, before, after) {
    const is_word = (character) => /[\p{L}\p{N}]/u.test(character);
    let can_open = !/\s/.test(after);
    let can_close = !/\s/.test(before);
    if (letter === "_") [can_open, can_close] = [can_open && !is_word(before), can_close && !is_word(after)];
    if (letter === "~" ? length !== 2 : length > 3) return this.add(letter.repeat(length));
    while (can_close && length > 0 && this.counts[letter] > 0) {
      const level = this.frames.findLastIndex((frame) => frame.letter === letter && frame.length <= length);
      if (level < 0) break;
      length -= this.frames[level].length;
      this.close(level);
    }
    if (length === 0) return;
    if (!can_open) return this.add(letter.repeat(length));
    for (const size of length === 3 ? [2, 1] : [length]) {
      this.frames.push({ letter, length: size, children: [] });
      this.counts[letter]++;
    }
  }

  close(level) {
    this.flatten(level);
    const frame = this.frames.pop();
    this.counts[frame.letter]--;
    this.add(filled(frame.letter === "~" ? "del" : frame.length === 2 ? "strong" : "em", frame.children));
  }

  /** Everything opened above `level` becomes text in it. */
  flatten(level) {
    const { children } = this.frames[level];
    for (const frame of this.frames.splice(level + 1)) {
      this.counts[frame.letter]--;
      children.push(frame.letter.repeat(frame.length));
      for (const child of frame.children) children.push(child);
    }
  }

  finish() {
    this.flatten(0);
    return this.frames[0].children;
  }
}
