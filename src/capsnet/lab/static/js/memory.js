// What the browser remembers beside the address: light or dark, the tour seen. Storage may be forbidden or full; the
// page works without, it only forgets.

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
    // nothing is lost but the memory
  }
}

export function forget(key, storage = "localStorage") {
  try {
    window[storage].removeItem(name(key));
  } catch {
    // it was not there
  }
}
