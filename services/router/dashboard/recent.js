// The requests sent from this page, newest first, with links to their timelines.

const KEPT = 20;
const requests = [];

export function remember(id, what) {
  if (!id || requests.some((one) => one.id === id)) return;
  requests.unshift({ id, what, at: Date.now() / 1000 });
  requests.length = Math.min(requests.length, KEPT);
}

export const recent = () => requests;

export const timelineOf = (id) => `#/timeline/${encodeURIComponent(id)}`;
