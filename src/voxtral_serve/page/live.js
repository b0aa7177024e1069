// The half of the page for live speech.

export function start(section) {
  const heading = document.createElement("h2");
  heading.textContent = "Live";
  section.append(heading);
}
