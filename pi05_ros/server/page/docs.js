// The API, read from /openapi.json: routes, parameters, bodies, answers, examples, schemas.

import { el } from "./elements.js";
import { TokenNeeded, ask, askForToken } from "./link.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
const LIMITS = {
  minimum: "≥",
  maximum: "≤",
  exclusiveMinimum: ">",
  exclusiveMaximum: "<",
  minLength: "length ≥",
  maxLength: "length ≤",
  minItems: "items ≥",
  maxItems: "items ≤",
  pattern: "like",
};

const name = (reference) => reference.split("/").at(-1);
const anchor = (text) => text.replace(/[^\w-]+/g, "-").replace(/^-|-$/g, "");
const json = (value) => (typeof value === "string" ? value : JSON.stringify(value, null, 2));

/** Text in which `code` is marked as such. */
const inline = (text) =>
  text
    .split(/(`+[^`]+`+)/)
    .filter(Boolean)
    .map((part) => (part.startsWith("`") ? el("code", { textContent: part.replaceAll("`", "") }) : part));

/** The same in several paragraphs. */
const prose = (text) =>
  (text ?? "")
    .split(/\n\s*\n/)
    .filter(Boolean)
    .map((paragraph) => el("p", {}, ...inline(paragraph)));

const joined = (schemas, by) => schemas.flatMap((one, index) => [...(index ? [by] : []), ...type(one)]);

/** What a value may be, in a line; schemas that have a name are links. */
function type(schema) {
  if (schema === true || !schema || !Object.keys(schema).length) return ["anything"];
  if (schema.$ref) return [el("a", { href: `#${anchor(name(schema.$ref))}`, textContent: name(schema.$ref) })];
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return joined(choices, " or ");
  if (schema.allOf) return joined(schema.allOf, " and ");
  if ("const" in schema) return [el("code", { textContent: JSON.stringify(schema.const) })];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(", ")];
  if (schema.prefixItems) return ["[", ...joined(schema.prefixItems, ", "), "]"];
  if (schema.type === "array") return ["list of ", ...type(schema.items)];
  if (schema.type === "object" && schema.additionalProperties instanceof Object)
    return ["map of ", ...type(schema.additionalProperties)];
  const kinds = [schema.type ?? "anything"].flat().join(" or ");
  return [schema.format ? `${kinds} (${schema.format})` : kinds];
}

function limits(schema) {
  const found = Object.entries(LIMITS)
    .filter(([key]) => key in schema)
    .map(([key, sign]) => `${sign} ${schema[key]}`);
  if (["string", "number", "boolean"].includes(typeof schema.default))
    found.push(`default ${JSON.stringify(schema.default)}`);
  return found.join(", ");
}

function row(label, schema, required, description) {
  const bounds = limits(schema);
  return el(
    "tr",
    {},
    el(
      "th",
      { scope: "row" },
      el("code", { textContent: label }),
      required ? el("small", { textContent: " required" }) : null,
    ),
    el("td", {}, ...type(schema), bounds ? el("small", { textContent: ` ${bounds}` }) : null),
    el("td", {}, ...prose(description ?? schema.description)),
  );
}

const table = (rows) => el("div", { class: "scroll" }, el("table", {}, el("tbody", {}, ...rows)));

/** A schema's own fields; for what has none, what it may be. */
function fields(schema) {
  const properties = Object.entries(schema.properties ?? {});
  if (!properties.length) return [el("p", {}, ...type(schema))];
  return [table(properties.map(([label, one]) => row(label, one, schema.required?.includes(label))))];
}

function example(title, value) {
  return el("details", {}, el("summary", { textContent: title }), el("pre", { textContent: json(value) }));
}

function examples(media) {
  const found = Object.entries(media.examples ?? {}).map(([key, one]) => example(one.summary ?? key, one.value));
  if (media.example !== undefined) found.push(example("example", media.example));
  for (const value of media.schema?.examples ?? []) found.push(example("example", value));
  return found;
}

/** The media types of a body; those of equal schema stand together. */
function content(media) {
  const groups = Map.groupBy
    ? Map.groupBy(Object.entries(media ?? {}), ([, one]) => JSON.stringify(one.schema ?? {}))
    : new Map(Object.entries(media ?? {}).map((entry) => [entry[0], [entry]]));
  return [...groups.values()].flatMap((group) => [
    el(
      "p",
      { class: "media" },
      ...group.map(([kind]) => el("code", { textContent: kind })),
      ...(Object.keys(group[0][1].schema ?? {}).length ? [" ", ...type(group[0][1].schema)] : []),
    ),
    ...(group[0][1].schema?.properties ? fields(group[0][1].schema) : []),
    ...group.flatMap(([, one]) => examples(one)),
  ]);
}

const resolve = (root, value) =>
  value?.$ref
    ? value.$ref
        .split("/")
        .slice(1)
        .reduce((inside, key) => inside?.[key.replaceAll("~1", "/")], root)
    : value;

function operation(root, path, method, one, shared) {
  const parameters = [...shared, ...(one.parameters ?? [])].map((entry) => resolve(root, entry));
  const body = resolve(root, one.requestBody);
  const part = (title, ...nodes) => (nodes.length ? [el("h3", { textContent: title }), ...nodes] : []);
  return el(
    "section",
    { class: "card", id: anchor(`${method} ${path}`) },
    el(
      "h2",
      {},
      el("span", { class: `method ${method}`, textContent: method.toUpperCase() }),
      el("code", { textContent: path }),
    ),
    el("p", { class: "summary", textContent: one.summary ?? "" }),
    ...prose(one.description),
    ...part(
      "Parameters",
      ...(parameters.length
        ? [
            table(
              parameters.map((entry) =>
                row(`${entry.in} ${entry.name}`, entry.schema ?? {}, entry.required, entry.description),
              ),
            ),
          ]
        : []),
    ),
    ...part("Request", ...prose(body?.description), ...content(body?.content)),
    ...part(
      "Answers",
      ...Object.entries(one.responses ?? {}).map(([status, entry]) => {
        const answer = resolve(root, entry);
        const inside = content(answer.content);
        const title = [
          el("b", { textContent: status, class: status < "400" ? "well" : "ill" }),
          " ",
          ...inline(answer.description ?? ""),
        ];
        return inside.length
          ? el("details", { class: "answer" }, el("summary", {}, ...title), ...inside)
          : el("p", { class: "answer" }, ...title);
      }),
    ),
  );
}

function draw(root) {
  const { info, paths = {}, components = {} } = root;
  document.title = `${info.title} API`;
  document.getElementById("version").textContent = `API ${info.version}`;
  const operations = Object.entries(paths).flatMap(([path, item]) =>
    METHODS.filter((method) => item[method]).map((method) => [path, method, item[method], item.parameters ?? []]),
  );
  const schemas = Object.entries(components.schemas ?? {});
  document
    .getElementById("contents")
    .replaceChildren(
      el("b", { textContent: "Routes" }),
      ...operations.map(([path, method]) =>
        el(
          "a",
          { href: `#${anchor(`${method} ${path}`)}` },
          el("span", { class: `method ${method}`, textContent: method.toUpperCase() }),
          path,
        ),
      ),
      ...(schemas.length ? [el("b", { textContent: "Schemas" })] : []),
      ...schemas.map(([label]) => el("a", { href: `#${anchor(label)}`, textContent: label })),
    );
  document
    .getElementById("operations")
    .replaceChildren(
      ...(info.description ? [el("section", { class: "card" }, ...prose(info.description))] : []),
      ...operations.map((entry) => operation(root, ...entry)),
      ...schemas.map(([label, schema]) =>
        el(
          "section",
          { class: "card", id: anchor(label) },
          el("h2", { textContent: label }),
          ...prose(schema.description),
          ...fields(schema),
          ...examples({ schema }),
        ),
      ),
    );
  document.getElementById(location.hash.slice(1))?.scrollIntoView(); // it was not there when the page came
}

for (;;) {
  try {
    const response = await ask("openapi.json");
    if (!response.ok) throw new Error(`The server answered ${response.status} instead of the document.`);
    draw(await response.json());
    break;
  } catch (error) {
    if (error instanceof TokenNeeded) {
      await askForToken(error.message);
      continue;
    }
    const banner = document.getElementById("banner");
    banner.textContent = `The API's description could not be read: ${error.message}`;
    banner.dataset.tone = "bad";
    banner.hidden = false;
    break;
  }
}
