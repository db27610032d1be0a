// SPDX-License-Identifier: Apache-2.0
// The server's public API: the served model, and an answer as it comes. Paths are relative, so a proxy may put a prefix in front.

const KEY = "whalefall.key";

/** A refusal in the API's own envelope, or a failure to reach the server (status 0). */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null, code = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
    this.code = code;
    this.retryAfter = retryAfter;
  }
}

export function setKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // storage is blocked: the key lasts as long as the page
  }
  current = key;
}

let current = (() => {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
})();

export const hasKey = () => current !== "";

/** The first served model: {id, root, max_model_len, notice?}; max_model_len is null while it loads. */
export async function servedModel() {
  const response = await ask("v1/models", {});
  return (await response.json()).data[0];
}

/** Yields the chunks of one streamed answer. Leaving the loop or aborting the signal ends the request in the engine. */
export async function* streamChat(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } }),
    signal,
  });
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error);
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer did.");
}

async function ask(path, options) {
  const headers = { "Content-Type": "application/json" };
  if (current) headers.Authorization = `Bearer ${current}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "same-origin", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (response.ok) return response;
  throw await refusal(response);
}

async function refusal(response) {
  const about = { status: response.status, retryAfter: response.headers.get("Retry-After") };
  try {
    const { error } = await response.json();
    return new ApiError(error.message, { ...about, param: error.param, code: error.code });
  } catch {
    return new ApiError(`The server answered with status ${response.status}.`, about); // a proxy's page, not our envelope
  }
}

/** The `data:` of server-sent events; comments are left out. The API writes one data line per event. */
async function* eventData(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new ApiError("The connection was lost before the answer ended.");
      });
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
