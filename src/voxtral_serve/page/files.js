// The half of the page for files.

export function start(section) {
  const heading = document.createElement("h2");
  heading.textContent = "Files";
  section.append(heading);
}
