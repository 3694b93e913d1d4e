// What the browser remembers besides the address: light or dark, and whether the tour was seen. Storage may be forbidden
// or full; the page works without it.

const name = (key) => `lab.${key}`;

export function recall(key, storage = "localStorage") {
  try {
    return window[storage].getItem(name(key));
  } catch {
    return null;
  }
}

export function remember(key, value, storage = "localStorage") {
  try {
    window[storage].setItem(name(key), value);
  } catch {
    // not remembered, nothing else is lost
  }
}

export function forget(key, storage = "localStorage") {
  try {
    window[storage].removeItem(name(key));
  } catch {
    // it was not there
  }
}
