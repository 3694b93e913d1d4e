/**
 * Who computes what the page shows. Both engines have one interface, and this module is all that differs between the two
 * Labs: `capsnet lab` serves it as it is, `capsnet lab --export` writes engine-static.js in its place.
 *
 *   models()                                     → {default, models}       what can be shown of each
 *   encode(pixels, {model, routing, focus})      → frame                   capsules, couplings, votes
 *   decoder(name)                                → frame                   weights, for decoder.js
 *   digits({model, label, only, random, after})  → {index, count, state}   which test image comes next
 *   digit(index, model), photo(file, model)      → frame                   pixels
 *   routings(), hand(votes, routing, options)    → the by-hand view
 *   greet(), check()                             whether the computing side is still the same
 *
 * A frame is {header, name: Float32Array with .shape, …}. A promise is rejected with a `Refusal` (a sentence for the user)
 * or, if the computing side is lost, with another error; then onStatus("gone") was called and onReturn will be.
 */

export { Engine } from "./engine-server.js";
