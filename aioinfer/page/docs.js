// Shows /openapi.json: each endpoint with its fields. The page's policy allows no HTML from strings.

function element(tag, text, ...children) {
  const made = document.createElement(tag);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

/** Returns what a schema allows, in a few words. */
function typeText(schema) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.anyOf) return schema.anyOf.map(typeText).join(" | ");
  if (schema.type === "array") return `list of ${typeText(schema.items) || "values"}`;
  return schema.type || "any";
}

function fieldTable(schema) {
  const required = new Set(schema.required);
  const rows = Object.entries(schema.properties || {}).map(([name, field]) =>
    element(
      "tr", "",
      element("td", "", element("code", name)),
      element("td", typeText(field)),
      element("td", required.has(name) ? "required" : ""),
    ));
  return element("table", "", element("tbody", "", ...rows));
}

function resolve(document_, schema) {
  return schema?.$ref ? document_.components.schemas[schema.$ref.split("/").pop()] : schema;
}

function endpoint(document_, path, method, operation) {
  const title = element("summary", "", element("code", `${method.toUpperCase()} ${path}`));
  title.append(` ${operation.summary}`);
  const shown = element("details", "", title);
  if (operation.description) shown.append(element("p", operation.description));
  for (const parameter of operation.parameters || []) {
    const line = element("p", "", element("code", parameter.name));
    line.append(` (${parameter.in}): ${typeText(parameter.schema)}`);
    shown.append(line);
  }
  for (const [type, content] of Object.entries(operation.requestBody?.content || {})) {
    shown.append(element("h3", `Body: ${type}`), fieldTable(resolve(document_, content.schema)));
  }
  for (const [type, content] of Object.entries(operation.responses["200"].content)) {
    shown.append(element("h3", `Reply: ${type}`));
    if (content.schema) shown.append(fieldTable(resolve(document_, content.schema)));
  }
  return shown;
}

const main = document.getElementById("endpoints");
try {
  const document_ = await (await fetch("openapi.json")).json();
  const below = document_.servers[0].url.replace(/\/$/, ""); // where the server is mounted
  const shown = Object.entries(document_.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) =>
      endpoint(document_, below + path, method, operation)));
  main.replaceChildren(...shown);
} catch (error) {
  main.textContent = `The description cannot be read: ${error}`;
}
