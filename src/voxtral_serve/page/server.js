// The corner that says what the server is and how busy it is.

export const state = Object.assign(new EventTarget(), { facts: null });

export function start(corner) {
  const heading = document.createElement("h2");
  heading.textContent = "Server";
  corner.append(heading);
}
