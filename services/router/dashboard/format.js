// Numbers and times in readable form.

const UNBOUNDED = 2 ** 30; // lanes without a bound on tokens say a number that no lane reaches

export function count(value) {
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${Math.round(value / 1e3)} k`;
  return new Intl.NumberFormat("en").format(Math.round(value));
}

export function bound(value) {
  return value >= UNBOUNDED ? "∞" : count(value);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0 s";
  if (value < 0.001) return `${trim(value * 1e6)} µs`;
  if (value < 1) return `${trim(value * 1e3)} ms`;
  if (value < 60) return `${trim(value)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
  if (value < 172800) return `${Math.floor(value / 3600)} h ${Math.floor((value % 3600) / 60)} min`;
  return `${Math.floor(value / 86400)} days`;
}

function trim(value) {
  return value >= 100 ? String(Math.round(value)) : String(Number(value.toPrecision(2)));
}

export function share({ used, depth }) {
  return depth > 0 ? used / depth : 0;
}

export function percent(value) {
  return value > 0 && value < 0.01 ? "<1 %" : `${Math.round(value * 100)} %`;
}

export function ago(then, now = Date.now() / 1000) {
  const past = Math.max(0, now - then);
  if (past < 60) return "just now";
  if (past < 3600) return `${Math.floor(past / 60)} min ago`;
  if (past < 86400) return `${Math.floor(past / 3600)} h ago`;
  return `${Math.floor(past / 86400)} days ago`;
}

// One or many of something: "1 turn", "2 turns", "2 queries".
export function many(number, noun) {
  const plural = noun.endsWith("y") ? `${noun.slice(0, -1)}ies` : `${noun}${noun.endsWith("ch") ? "es" : "s"}`;
  return `${count(number)} ${number === 1 ? noun : plural}`;
}

export function bytes(value) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  let shown = value;
  while (shown >= 1000 && unit < units.length - 1) [shown, unit] = [shown / 1000, unit + 1];
  return `${unit && shown < 10 ? shown.toFixed(1) : Math.round(shown)} ${units[unit]}`;
}
