// Elements in one call. What a server says becomes text, never markup.

/** An element with these properties and children (elements or texts). */
export function element(tag, properties = {}, ...children) {
  const { role, ...rest } = properties;
  const made = Object.assign(document.createElement(tag), rest);
  if (role) made.setAttribute("role", role);
  made.append(...children);
  return made;
}
