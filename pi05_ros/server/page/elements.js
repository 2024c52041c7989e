// Elements of a page. Whatever comes from the server goes in as text, never as markup.

export const $ = (id) => document.getElementById(id);

/** An element. properties: of the element; "class" and names with a dash are attributes. */
export function el(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name === "class" || name === "for" || name === "role" || name.includes("-")) node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** The text of an element, touched only when it changes. */
export function put(id, text) {
  if ($(id).textContent !== text) $(id).textContent = text;
}

/** The children of an element, made by `make` when `key` is another than before. */
export function build(id, key, make) {
  if ($(id).dataset.key !== key) {
    $(id).dataset.key = key;
    $(id).replaceChildren(...make());
  }
  return [...$(id).children];
}
