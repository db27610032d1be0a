// SPDX-License-Identifier: Apache-2.0
// Run: one answer from the request to its end. Fills the message and measures it; knows nothing of the page.

const SAVE_EVERY_MS = 1000;

export class Run {
  /** stream(body, signal) yields chunks; onMoved comes at most once per frame, onSave now and then, onEnd exactly once unless dropped. */
  constructor(message, stream, body, { onMoved, onSave, onEnd }) {
    Object.assign(this, { message, stream, body, onMoved, onSave, onEnd });
    this.controller = new AbortController();
    this.num_spoken = 0;
    this.is_dropped = false;
    this.frame = 0;
    this.saved_ms = performance.now();
  }

  async start() {
    this.started_ms = performance.now();
    this.message.stats = {};
    let failure = null;
    try {
      for await (const chunk of this.stream(this.body, this.controller.signal)) this.take(chunk);
    } catch (error) {
      if (this.controller.signal.aborted) this.message.ending = "stopped";
      else failure = this.fail(error);
    }
    cancelAnimationFrame(this.frame);
    if (this.message.ending === "running") this.message.ending = "stop";
    if (!this.is_dropped) this.onEnd(failure);
  }

  stop() {
    this.controller.abort();
  }

  /** Stop, and tell nobody: the conversation is gone. */
  drop() {
    this.is_dropped = true;
    this.controller.abort();
  }

  /** The page goes away: what is there is kept, and the broken connection is no fault. */
  leave() {
    this.save();
    this.is_dropped = true;
  }

  save() {
    if (!this.is_dropped) this.onSave();
  }

  take(chunk) {
    const { message } = this;
    if (chunk.usage) this.count(chunk.usage);
    const choice = chunk.choices[0];
    if (!choice) return;
    const { content, reasoning_content: reasoning } = choice.delta;
    if (content || reasoning) this.measure(Boolean(content));
    if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
    if (content) message.content += content;
    if (choice.finish_reason && choice.finish_reason !== "stop") message.ending = choice.finish_reason;
    this.moved();
  }

  count(usage) {
    this.message.stats.tokens = usage.completion_tokens;
    this.message.stats.prompt_tokens = usage.prompt_tokens;
    this.message.stats.cached_tokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
  }

  measure(is_content) {
    const now_ms = performance.now();
    const { message } = this;
    this.first_ms ??= now_ms;
    message.stats.ttft_s = (this.first_ms - this.started_ms) / 1000;
    message.stats.decode_s = (now_ms - this.first_ms) / 1000;
    if (is_content && message.reasoning && message.reasoning_s === undefined) message.reasoning_s = message.stats.decode_s;
  }

  moved() {
    if (this.frame === 0 && !this.is_dropped) {
      this.frame = requestAnimationFrame(() => {
        this.frame = 0;
        this.onMoved();
      });
    }
    if (performance.now() - this.saved_ms > SAVE_EVERY_MS) {
      this.saved_ms = performance.now();
      this.save();
    }
  }

  fail(error) {
    this.message.ending = "error";
    const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    this.message.error = `${error.message}${wait}`;
    return error;
  }
}
