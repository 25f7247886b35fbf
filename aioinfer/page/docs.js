// Shows /openapi.json: each endpoint with its fields, and a form that calls it.

import { JSON_BODY, keepKey, readText, request, send } from "./api.js";
import { $, element } from "./elements.js";
import { tool } from "./menu.js";

const SHOWN = 200_000; // characters of an answer

let types = {}; // the schemas of the description, by name

/** The nodes of a text with `code` in it. */
const coded = (text) =>
  text.split("`").map((part, index) => (index % 2 ? element("code", "", part) : part));

/**
 * Makes a fold whose content is made when it is first opened: there are many, and types may name
 * each other.
 */
function fold(summary, make) {
  const made = element("details", "", "", summary);
  made.addEventListener("toggle", () => made.append(...make()), { once: true });
  return made;
}

const nameOf = ({ $ref }) => $ref.split("/").pop();

/** Returns what a schema allows, in a few words. */
function typeText(schema) {
  if (!schema || !Object.keys(schema).length) return "any";
  if (schema.$ref) return nameOf(schema);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(typeText).join(" | ");
  if (schema.type === "array") return `list of ${typeText(schema.items) || "values"}`;
  return schema.contentSchema ? `JSON: ${typeText(schema.contentSchema)}` : schema.type || "any";
}

/** Returns the names of the objects with fields of their own that a schema names, wherever it does. */
function objectsIn(schema) {
  if (!schema) return [];
  if (schema.$ref) {
    const name = nameOf(schema);
    return Object.keys(types[name].properties ?? {}).length ? [name] : [];
  }
  return [...(schema.anyOf ?? []), schema.items, schema.contentSchema].flatMap(objectsIn);
}

function fieldTable({ required = [], properties = {} }) {
  const isIdle = ([, field]) => Boolean(field.description?.startsWith("It has no effect"));
  const fields = Object.entries(properties).sort((one, other) => isIdle(one) - isIdle(other));
  const rows = fields.map(([name, field]) => {
    const said = required.includes(name) ? "required" : (field.description ?? "");
    const type = element("td", "", typeText(field), ...foldsOf(field));
    const named = element("td", "", "", element("code", "", name));
    return element("tr", "", "", named, type, element("td", "", "", ...coded(said)));
  });
  return element("table", "", "", element("tbody", "", "", ...rows));
}

function foldsOf(schema) {
  return objectsIn(schema).map((name) =>
    fold(element("summary", "", name), () => [fieldTable(types[name])]));
}

/** Returns a schema's fields: its own, or those of the objects that it names. */
function fieldsOf(schema) {
  if (schema.$ref && objectsIn(schema).length) return [fieldTable(types[nameOf(schema)])];
  if (schema.properties) return [fieldTable(schema)];
  return [element("p", "", typeText(schema)), ...foldsOf(schema)];
}

function endpoint(address, path, method, operation) {
  const called = element("code", "", `${method.toUpperCase()} ${address}`);
  const title = element("summary", "", "", called);
  title.append(" ", ...coded(operation.summary));
  return fold(title, () => {
    const said = element("p", "", "", ...coded(operation.description ?? ""));
    const shown = [said, trial(path, method, operation)];
    for (const [type, { schema }] of Object.entries(operation.requestBody?.content ?? {}))
      shown.push(element("h2", "", `Body: ${type}`), ...fieldsOf(schema));
    for (const [type, { schema }] of Object.entries(operation.responses["200"].content))
      shown.push(element("h2", "", `Reply: ${type}`), ...(schema ? fieldsOf(schema) : []));
    return shown;
  });
}

// ---------------------------------------------------------------- calls

/** Adds a field with its label to a form; returns the field. */
function addField(form, label, name, type = "text") {
  const input = element("input");
  Object.assign(input, { name, type });
  form.append(element("label", "", `${label} `, input));
  return input;
}

/** Returns a form that calls an endpoint and shows the answer as it comes. */
function trial(path, method, { parameters = [], requestBody }) {
  const form = element("form");
  const fields = parameters.map((parameter) => {
    const { name, schema, required } = parameter;
    const input = addField(form, `${name}: ${typeText(schema)}`, name);
    input.required = Boolean(required);
    return { ...parameter, input };
  });
  const body = addBody(form, requestBody?.content ?? {});
  const sends = element("button", "", "Send");
  let aborter = null;
  const stop = tool("Stop", () => aborter.abort());
  const status = element("p");
  const answer = element("pre");
  stop.hidden = answer.hidden = true;
  status.role = "status";
  Object.assign(answer, { tabIndex: 0, role: "region", ariaLabel: "Answer" });
  form.append(element("p", "", "", sends, stop), status, answer);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    aborter = new AbortController();
    sends.disabled = true;
    stop.hidden = false;
    try {
      const options = { method: method.toUpperCase(), signal: aborter.signal, ...body() };
      await call(addressOf(path, fields), options, status, answer);
    } catch (error) {
      status.textContent = error.name === "AbortError" ? "Stopped" : error.message;
    }
    sends.disabled = false;
    stop.hidden = true;
  });
  return form;
}

/** Adds the fields of a body to a form; returns what reads them, and throws for wrong JSON. */
function addBody(form, { "application/json": json, "multipart/form-data": parts }) {
  if (json) return addJson(form, json);
  if (!parts) return () => ({});
  const inputs = Object.entries(parts.schema.properties).map(([name, schema]) => {
    const input = addField(form, name, name, schema.format === "binary" ? "file" : "text");
    input.required = true;
    if (schema.enum) input.value = schema.enum[0];
    return input;
  });
  return () => {
    const body = new FormData();
    for (const { name, files, value } of inputs) body.append(name, files ? files[0] : value);
    return { body };
  };
}

function addJson(form, { example, schema }) {
  const field = element("textarea");
  field.value = JSON.stringify(example, null, 2);
  field.spellcheck = false;
  form.append(element("label", "", "Body, as JSON ", field));
  if (schema.$ref && types[nameOf(schema)].properties.stream) {
    const box = addField(form, "Streamed", "stream", "checkbox");
    box.addEventListener("change", () => {
      field.value = indented(field.value, { stream: box.checked });
    });
  }
  return () => {
    try {
      JSON.parse(field.value);
    } catch (error) {
      throw new Error(`The body is not JSON: ${error.message}`);
    }
    return { body: field.value, headers: JSON_BODY };
  };
}

function addressOf(path, fields) {
  const query = new URLSearchParams();
  let found = path;
  for (const { name, in: place, input } of fields) {
    if (place === "path") found = found.replace(`{${name}}`, encodeURIComponent(input.value));
    else if (input.value) query.set(name, input.value);
  }
  return query.size ? `${found}?${query}` : found;
}

/** Calls the server and shows what it answers, as it comes. */
async function call(path, options, status, answer) {
  const began = performance.now();
  answer.hidden = true;
  status.textContent = "Waiting for the server";
  const response = await send(path, options);
  const type = response.headers.get("Content-Type") ?? "(no body)";
  const head = `${response.status} ${response.statusText} · ${type}`;
  status.textContent = head;
  answer.hidden = false;
  answer.textContent = "";
  let text = "";
  for await (const part of readText(response.body)) {
    text += part;
    if (answer.textContent.length < SHOWN) answer.textContent = text.slice(0, SHOWN);
  }
  if (type.startsWith("application/json")) answer.textContent = indented(text).slice(0, SHOWN);
  if (text.length > SHOWN) answer.textContent += "\n…";
  status.textContent = `${head} · ${Math.round(performance.now() - began)} ms`;
}

/** JSON that people can read, with `more` fields; what is no JSON stays as it is. */
function indented(text, more = null) {
  try {
    const value = JSON.parse(text);
    return JSON.stringify(more ? { ...value, ...more } : value, null, 2);
  } catch {
    return text;
  }
}

// ---------------------------------------------------------------- the page

async function show() {
  const { servers, paths, components } = await (await request("/openapi.json")).json();
  const below = servers[0].url.replace(/\/$/, ""); // where the server is mounted
  types = components.schemas;
  const shown = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) =>
      endpoint(below + path, path, method, operation)));
  $("endpoints").replaceChildren(...shown);
}

$("key").addEventListener("change", () => keepKey($("key").value));
show().catch(({ message }) => {
  $("endpoints").textContent = `The description cannot be read: ${message}`;
});
