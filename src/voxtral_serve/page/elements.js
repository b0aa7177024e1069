// Elements are made here and not from markup: what comes from files, servers and models is only ever text.

// `element("button", {class: "small", type: "button", "aria-label": "Play", click: play}, "Play", icon)`: functions are
// listeners of events, null and false are left out, true is an empty attribute; children are elements and text.
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(attribute, value);
    else if (value === true) made.setAttribute(attribute, "");
    else if (value !== null && value !== false && value !== undefined) made.setAttribute(attribute, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function button(text, click, attributes = {}) {
  return element("button", { type: "button", click, ...attributes }, text);
}

// 75.2 -> "1:15", 3675 -> "1:01:15"
export function clock(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  const parts = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
  if (!parts[0]) parts.shift();
  return parts.map((part, index) => (index ? String(part).padStart(2, "0") : String(part))).join(":");
}

// 600 -> "10 min", 90 -> "1:30 min"
export function duration(seconds) {
  return `${seconds % 60 ? clock(seconds) : seconds / 60} min`;
}

// 26214400 -> "25 MiB"
export function size(bytes) {
  const units = ["bytes", "KiB", "MiB", "GiB"];
  const power = Math.min(bytes ? Math.floor(Math.log2(bytes) / 10) : 0, units.length - 1);
  const value = bytes / 1024 ** power;
  return `${value < 10 && power ? value.toFixed(1).replace(/\.0$/, "") : Math.round(value)} ${units[power]}`;
}
