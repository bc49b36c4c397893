// The server's API: one place that knows the key, errors and streams.

const KEY = "mlxkv.key";
/** @type {null | ((why: string) => Promise<string>)} */
let askForKey = null;
let asking = null;

/** `ask(why)` is called when the server wants a key, and gives one back. */
export function onKeyWanted(ask) {
  askForKey = ask;
}

/** An error that the server told, or that there is no server. `status` is 0 then. */
export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** `fetch` with the key; asks for one where it is missing or wrong. Rejects with ApiError, or AbortError. */
export async function call(path, { body, signal, quiet = false } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = {};
    if (key) headers.Authorization = `Bearer ${key}`;
    if (body !== undefined) headers["Content-Type"] = "application/json";
    let response;
    try {
      response = await fetch(path, {
        method: body === undefined ? "GET" : "POST",
        headers,
        body: body === undefined ? undefined : JSON.stringify(body),
        signal,
        cache: "no-store",
      });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server does not answer.", 0, "unreachable");
    }
    if (response.status === 401 && askForKey && !(quiet && asking)) {
      await renewKey(key);
      continue;
    }
    if (!response.ok) throw await failure(response);
    return response;
  }
}

/** One question, however many requests wait for its answer. */
async function renewKey(tried) {
  if (sessionStorage.getItem(KEY) !== tried) return; // another request got one meanwhile
  asking ??= askForKey(tried ? "That key is not right." : "")
    .then((key) => sessionStorage.setItem(KEY, key))
    .finally(() => {
      asking = null;
    });
  await asking;
}

async function failure(response) {
  let told = null;
  try {
    told = (await response.json()).error;
  } catch {
    // not ours: a proxy's page, say
  }
  const message = told?.message || `The server answered ${response.status}.`;
  return new ApiError(message, response.status, told?.code ?? null);
}

export async function json(path, options) {
  return (await call(path, options)).json();
}

/** The objects of a stream of server-sent events, up to `[DONE]`. Rejects with ApiError where the server tells one. */
export async function* events(path, body, signal) {
  const response = await call(path, { body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError("The answer was cut off.", 0, "cut_off");
      buffer += value;
      let end;
      while ((end = buffer.search(/\r?\n\r?\n/)) >= 0) {
        const block = buffer.slice(0, end);
        buffer = buffer.slice(end).replace(/^\r?\n\r?\n/, "");
        const data = block
          .split(/\r?\n/)
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart())
          .join("\n");
        if (!data) continue; // a comment: somebody is there
        if (data === "[DONE]") return;
        const made = JSON.parse(data);
        if (made.error) throw new ApiError(made.error.message, 200, made.error.code);
        yield made;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
