// Shows /openapi.json: each endpoint with its fields, and a form that calls it. The page's policy
// allows no HTML from strings.

import { authorization, keepKey } from "./api.js";

const SHOWN = 200_000; // characters of an answer
const NO_BODY = "(no body)";

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

/**
 * Makes a fold whose content is made when it is first opened: there are many, and types may name
 * each other.
 */
function fold(summary, make) {
  const made = element("details", "", summary);
  made.addEventListener("toggle", () => made.append(...make()), { once: true });
  return made;
}

function nameOf(schema) {
  return schema.$ref.split("/").pop();
}

/** Returns what a schema allows, in a few words. */
function typeText(schema) {
  if (!schema || !Object.keys(schema).length) return "any";
  if (schema.$ref) return nameOf(schema);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(typeText).join(" | ");
  if (schema.type === "array") return `list of ${typeText(schema.items) || "values"}`;
  return schema.type || "any";
}

/** Returns the objects with fields of their own that a schema names, wherever it does. */
function namedObjects(document_, schema) {
  if (!schema) return [];
  if (schema.$ref) {
    const object = document_.components.schemas[nameOf(schema)];
    return Object.keys(object.properties || {}).length ? [schema] : [];
  }
  return [...(schema.anyOf || []), ...(schema.items ? [schema.items] : [])].flatMap((each) =>
    namedObjects(document_, each));
}

function fieldTable(document_, schema) {
  const required = new Set(schema.required);
  const isIdle = ([, field]) => Boolean(field.description?.startsWith("It has no effect"));
  const fields = Object.entries(schema.properties || {});
  fields.sort((one, other) => isIdle(one) - isIdle(other));
  const rows = fields.map(([name, field]) =>
    element(
      "tr", "",
      element("td", "", element("code", name)),
      element("td", "", typeText(field), ...folds(document_, field)),
      element("td", required.has(name) ? "required" : field.description || ""),
    ));
  return element("table", "", element("tbody", "", ...rows));
}

function folds(document_, schema) {
  return namedObjects(document_, schema).map((each) =>
    fold(element("summary", nameOf(each)), () => [
      fieldTable(document_, document_.components.schemas[nameOf(each)]),
    ]));
}

/** Returns a schema's fields: its own, or those of the objects that it names. */
function fieldsOf(document_, schema) {
  const named = namedObjects(document_, schema);
  if (named.length === 1 && schema.$ref) {
    return [fieldTable(document_, document_.components.schemas[nameOf(schema)])];
  }
  if (schema.properties) return [fieldTable(document_, schema)];
  return [element("p", typeText(schema)), ...folds(document_, schema)];
}

function endpoint(document_, below, path, method, operation) {
  const title = element("summary", "", element("code", `${method.toUpperCase()} ${below}${path}`));
  title.append(` ${operation.summary}`);
  return fold(title, () => {
    const shown = operation.description ? [element("p", operation.description)] : [];
    shown.push(trial(document_, path, method, operation));
    for (const [type, content] of Object.entries(operation.requestBody?.content || {})) {
      shown.push(element("h2", `Body: ${type}`), ...fieldsOf(document_, content.schema));
    }
    for (const [type, content] of Object.entries(operation.responses["200"].content)) {
      shown.push(element("h2", `Reply: ${type}`));
      if (content.schema) shown.push(...fieldsOf(document_, content.schema));
    }
    return shown;
  });
}

// ---------------------------------------------------------------- calls

function labelled(text, input) {
  return element("label", text, input);
}

function field(name, type = "text") {
  const input = element("input");
  input.name = name;
  input.type = type;
  return input;
}

/** Returns a form that calls an endpoint and shows the answer as it comes. */
function trial(document_, path, method, operation) {
  const content = operation.requestBody?.content || {};
  const form = element("form");
  const parameters = (operation.parameters || []).map((parameter) => {
    const input = field(parameter.name);
    input.required = Boolean(parameter.required);
    form.append(labelled(`${parameter.name}: ${typeText(parameter.schema)} `, input));
    return { ...parameter, input };
  });
  const body = bodyField(document_, content, form);
  const send = element("button", "Send");
  const stop = element("button", "Stop");
  stop.type = "button";
  stop.hidden = true;
  const status = element("p");
  status.setAttribute("role", "status");
  const answer = element("pre");
  answer.tabIndex = 0;
  answer.hidden = true;
  answer.setAttribute("role", "region");
  answer.setAttribute("aria-label", "Answer");
  form.append(element("p", "", send, stop), status, answer);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const aborter = new AbortController();
    stop.onclick = () => aborter.abort();
    send.disabled = true;
    stop.hidden = false;
    try {
      await call(addressOf(path, parameters), method, body(), aborter.signal, status, answer);
    } catch (error) {
      status.textContent = error.name === "AbortError" ? "Stopped" : String(error.message || error);
    }
    send.disabled = false;
    stop.hidden = true;
  });
  return form;
}

/** Adds the fields of a body to a form, and returns what reads them; it throws for wrong JSON. */
function bodyField(document_, content, form) {
  const json = content["application/json"];
  if (json) {
    const text = element("textarea");
    text.value = JSON.stringify(json.example, null, 2);
    text.rows = Math.min(20, text.value.split("\n").length + 1);
    text.spellcheck = false;
    form.append(labelled("Body, as JSON ", text));
    const named = json.schema.$ref && document_.components.schemas[nameOf(json.schema)];
    if (named?.properties.stream) form.append(streamSwitch(text));
    return () => {
      try {
        JSON.parse(text.value);
      } catch (error) {
        throw new Error(`The body is not JSON: ${error.message}`);
      }
      return { data: text.value, headers: { "Content-Type": "application/json" } };
    };
  }
  const parts = content["multipart/form-data"];
  if (!parts) return () => ({ headers: {} });
  const inputs = Object.entries(parts.schema.properties).map(([name, schema]) => {
    const input = field(name, schema.format === "binary" ? "file" : "text");
    input.required = true;
    if (schema.enum) input.value = schema.enum[0];
    form.append(labelled(`${name} `, input));
    return input;
  });
  return () => {
    const data = new FormData();
    for (const input of inputs) data.append(input.name, input.files ? input.files[0] : input.value);
    return { data, headers: {} };
  };
}

/** Returns a box that writes `stream` into the JSON of a text field. */
function streamSwitch(text) {
  const box = field("stream", "checkbox");
  box.addEventListener("change", () => {
    try {
      text.value = JSON.stringify({ ...JSON.parse(text.value), stream: box.checked }, null, 2);
    } catch {
      // what is no JSON is said when it is sent
    }
  });
  const label = element("label", "", box, " Streamed");
  label.className = "check";
  return label;
}

function addressOf(path, parameters) {
  const query = new URLSearchParams();
  let found = path;
  for (const { name, in: place, input } of parameters) {
    if (place === "path") found = found.replace(`{${name}}`, encodeURIComponent(input.value));
    else if (input.value) query.set(name, input.value);
  }
  return query.size ? `.${found}?${query}` : `.${found}`;
}

/** Calls the server and shows what it answers, as it comes. */
async function call(url, method, { data, headers }, signal, status, answer) {
  const began = performance.now();
  answer.hidden = true;
  status.textContent = "Waiting for the server";
  const response = await fetch(url, {
    method: method.toUpperCase(),
    headers: { ...authorization(), ...headers },
    body: data,
    signal,
    cache: "no-store",
  }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached.");
  });
  const type = response.headers.get("Content-Type") || "";
  const head = `${response.status} ${response.statusText} · ${type || NO_BODY}`;
  status.textContent = head;
  answer.hidden = false;
  answer.textContent = "";
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    text += decoder.decode(part.value, { stream: true });
    if (answer.textContent.length < SHOWN) answer.textContent = text.slice(0, SHOWN);
  }
  if (type.startsWith("application/json")) answer.textContent = indented(text).slice(0, SHOWN);
  if (text.length > SHOWN) answer.textContent += "\n…";
  status.textContent = `${head} · ${Math.round(performance.now() - began)} ms`;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// ---------------------------------------------------------------- the page

const key = document.getElementById("key");
key.addEventListener("change", () => keepKey(key.value));

const main = document.getElementById("endpoints");
try {
  const document_ = await (await fetch("openapi.json", { headers: authorization() })).json();
  const below = document_.servers[0].url.replace(/\/$/, ""); // where the server is mounted
  const shown = Object.entries(document_.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) =>
      endpoint(document_, below, path, method, operation)));
  main.replaceChildren(...shown);
} catch (error) {
  main.textContent = `The description cannot be read: ${error}`;
}
