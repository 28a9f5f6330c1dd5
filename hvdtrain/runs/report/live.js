// Replaces the values of the page by those of its server, once a second.
let version = "";

function say(text) {
  let place = document.getElementById("lost");
  if (!text) { if (place) place.remove(); return; }
  if (!place) {
    place = document.createElement("div");
    place.id = "lost";
    place.setAttribute("role", "status");
    document.body.append(place);
  }
  place.textContent = text;
}

function replaceTables(html) {
  const tables = document.getElementById("tables");
  const opened = [...tables.querySelectorAll("details[open] > summary")].map((each) => each.textContent);
  const focused = document.activeElement?.closest("#tables summary")?.textContent;
  tables.innerHTML = html;
  for (const summary of tables.querySelectorAll("details > summary")) {
    summary.parentElement.open = opened.includes(summary.textContent);
    if (summary.textContent === focused) summary.focus();
  }
}

async function update() {
  try {
    const answer = await fetch(`values.json?version=${encodeURIComponent(version)}`);
    if (answer.status === 200) {
      const found = await answer.json();
      if (found.layout !== document.body.dataset.layout) { location.reload(); return; }
      for (const page of Bokeh.documents) {
        for (const [name, columns] of Object.entries(found.sources)) {
          const source = page.get_model_by_name(name);
          if (source) source.data = columns;
        }
      }
      replaceTables(found.tables);
      version = found.version;
    }
    say("");
  } catch (error) {
    say("The server of this page does not answer.");
  }
  setTimeout(update, 1000);
}

setTimeout(update, 1000);
