// The requests for answers, and the same as code, for the command line and for Python.

const CHAT = "/v1/chat/completions";

/**
 * Returns `{ path, body }` of the request that has `messages` answered, the last of them continued if
 * it is an answer; a model without a chat template continues the text of the last message.
 */
export function requestOf(messages, { model, isChat, settings }) {
  const { system, ...fields } = settings;
  const body = { model, stream: true, stream_options: { include_usage: true }, ...fields };
  const isOpen = messages.at(-1).role === "assistant";
  if (!isChat) {
    const prompt = messages.slice(isOpen ? -2 : -1).map(({ content }) => content).join("");
    return { path: "/v1/completions", body: { ...body, prompt } };
  }
  const all = system ? [{ role: "system", content: system }, ...messages] : messages;
  const goesOn = isOpen ? { continue_final_message: true, add_generation_prompt: false } : {};
  return { path: CHAT, body: { timings_per_token: true, ...body, ...goesOn, messages: all } };
}

/** Returns code that sends a request `{ path, body }`; `kind` is "curl" or "python". */
export function codeOf(kind, { path, body }) {
  const root = new URL("./", document.baseURI).href.replace(/\/$/, "");
  if (kind === "python") return python(root, path, body);
  const json = JSON.stringify(body, null, 2).replaceAll("'", `'\\''`);
  const key = `-H "Authorization: Bearer $API_KEY" \\\n  `;
  return `curl ${root}${path} \\\n  ${key}-H 'Content-Type: application/json' \\\n  -d '${json}'\n`;
}

function python(root, path, { stream_options: _, timings_per_token: __, ...body }) {
  const own = new Set(["model", "messages", "prompt", "stream", "temperature", "top_p", "max_tokens",
    "seed", "stop", "presence_penalty", "frequency_penalty", "tools", "tool_choice", "logprobs",
    "top_logprobs", "parallel_tool_calls", "response_format"]); // what the client knows by name
  const entries = Object.entries(body);
  const more = Object.fromEntries(entries.filter(([name]) => !own.has(name)));
  const lines = entries
    .filter(([name]) => own.has(name))
    .map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  if (Object.keys(more).length) lines.push(`    extra_body=${literal(more, 1)},`);
  const call = path === CHAT ? "client.chat.completions" : "client.completions";
  const part = path === CHAT ? "event.choices[0].delta.content" : "event.choices[0].text";
  return `import os

from openai import OpenAI

client = OpenAI(base_url="${root}/v1", api_key=os.environ.get("API_KEY", "none"))
stream = ${call}.create(
${lines.join("\n")}
)
for event in stream:
    if event.choices:
        print(${part} or "", end="", flush=True)
`;
}

/** A value as Python writes it. */
function literal(value, depth) {
  const pad = "    ".repeat(depth);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const items = Array.isArray(value)
    ? value.map((each) => literal(each, depth + 1))
    : Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${literal(each, depth + 1)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  if (!items.length) return open + close;
  return `${open}\n${items.map((item) => `${pad}    ${item},`).join("\n")}\n${pad}${close}`;
}
