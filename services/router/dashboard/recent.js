// The requests this page has made, newest first, so that their timelines are at hand.

const KEPT = 20;
const requests = [];

export function remember(id, what) {
  if (!id || requests.some((one) => one.id === id)) return;
  requests.unshift({ id, what, at: Date.now() / 1000 });
  requests.length = Math.min(requests.length, KEPT);
}

export const recent = () => requests;

export const timelineOf = (id) => `#/timeline/${encodeURIComponent(id)}`;
