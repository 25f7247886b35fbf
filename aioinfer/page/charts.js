// Drawing on canvases. Sizes are in CSS pixels; colours are the custom properties of page.css, by
// name.

const probe = document.createElement("span"); // takes on colours, to be asked for their values
probe.hidden = true;

/** Empties a canvas, fits it to the screen's pixels, and returns [context, width, height]. */
function fit(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const scale = devicePixelRatio || 1;
  const context = canvas.getContext("2d");
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width, height];
}

/** Returns the value of a colour of the page in the theme that is shown. */
function colour(name) {
  probe.style.color = `var(--${name})`;
  if (!probe.isConnected) document.body.append(probe);
  return getComputedStyle(probe).color;
}

/**
 * Draws `total` cells, of which the first `used` are taken; a bar where they would be too small to
 * see.
 */
export function drawCells(canvas, used, total) {
  const [context, width, height] = fit(canvas);
  const gap = 2;
  let size = 14;
  const columnsOf = (cell) => Math.floor((width + gap) / (cell + gap));
  while (size > 3 && Math.ceil(total / columnsOf(size)) * (size + gap) - gap > height) size--;
  if (size <= 3) {
    drawBar(canvas, [["used", used], ["free", total - used]]);
    return;
  }
  const columns = columnsOf(size);
  const [taken, free] = [colour("used"), colour("free")];
  for (let cell = 0; cell < total; cell++) {
    context.fillStyle = cell < used ? taken : free;
    const x = (cell % columns) * (size + gap);
    const y = Math.floor(cell / columns) * (size + gap);
    context.beginPath();
    context.roundRect(x, y, size, size, size / 4);
    context.fill();
  }
}

/** Draws the parts of a whole, `[[colour, number], ...]`, side by side. */
export function drawBar(canvas, parts) {
  const [context, width, height] = fit(canvas);
  const total = parts.reduce((sum, [, number]) => sum + number, 0) || 1;
  let x = 0;
  for (const [name, number] of parts) {
    const long = number ? Math.max(1, (width * number) / total) : 0; // what is there can be seen
    context.fillStyle = colour(name);
    context.fillRect(x, 0, long, height);
    x += long;
  }
}

/**
 * Draws `points`, `[{ at, value }]` (value null: a gap), over the `span` milliseconds before `now`.
 */
export function drawSparkline(canvas, points, now, span, name) {
  const [context, width, height] = fit(canvas);
  const top = Math.max(1, ...points.map((point) => point.value ?? 0));
  const place = ({ at, value }) => [
    width - ((now - at) / span) * width,
    height - 1 - (value / top) * (height - 3),
  ];
  context.fillStyle = colour("line");
  context.fillRect(0, height - 1, width, 1);
  context.strokeStyle = context.fillStyle = colour(name);
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  for (const run of runs(points)) {
    context.beginPath();
    run.forEach((point) => context.lineTo(...place(point)));
    context.stroke();
    context.lineTo(place(run.at(-1))[0], height);
    context.lineTo(place(run[0])[0], height);
    context.globalAlpha = 0.12;
    context.fill();
    context.globalAlpha = 1;
  }
}

/** Splits points at their gaps. */
function runs(points) {
  const found = [[]];
  for (const point of points) {
    if (point.value === null) found.push([]);
    else found.at(-1).push(point);
  }
  return found.filter((run) => run.length);
}

/**
 * Draws stacked columns: `rows[i]` holds the numbers of `names`, and the newest row is at the
 * right. Returns the highest sum.
 */
export function drawColumns(canvas, rows, names, places, selected) {
  const [context, width, height] = fit(canvas);
  const sums = rows.map((row) => row.reduce((sum, value) => sum + value, 0));
  const top = Math.max(1, ...sums);
  const step = width / places;
  const first = places - rows.length;
  if (selected >= 0) {
    context.fillStyle = colour("sunken");
    context.fillRect((first + selected) * step - 1, 0, step + 1, height);
  }
  const bases = rows.map(() => height - 1);
  names.forEach((name, series) => {
    context.fillStyle = colour(name);
    rows.forEach((row, index) => {
      const tall = (row[series] / top) * (height - 2);
      bases[index] -= tall;
      context.fillRect((first + index) * step, bases[index], Math.max(1, step - 1), tall);
    });
  });
  context.fillStyle = colour("line");
  context.fillRect(0, height - 1, width, 1);
  return Math.max(0, ...sums);
}

/** Draws `rows` times `columns` bytes: 0 as the background, 255 in full colour. */
export function drawHeat(canvas, bytes, rows, columns) {
  const [context, width, height] = fit(canvas);
  context.fillStyle = colour("sunken");
  context.fillRect(0, 0, width, height);
  context.fillStyle = colour("used");
  bytes.forEach((byte, index) => {
    const column = index % columns;
    const row = Math.floor(index / columns);
    context.globalAlpha = byte / 255;
    const [wide, high] = [width / columns, height / rows];
    context.fillRect(column * wide, row * high, wide, high);
  });
  context.globalAlpha = 1;
}
