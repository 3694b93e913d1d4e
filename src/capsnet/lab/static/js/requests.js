// Requests to the engine: "the newest request wins", and the error of one that was refused.

/** Why the engine refused a request: a sentence, with the status of the server's answer (503: try again later). */
export class Refusal extends Error {
  constructor(sentence, status) {
    super(sentence);
    this.status = status;
  }
}

/**
 * One request in flight, the newest one next, those in between are dropped. `ask(question)` → promise;
 * `deliver(answer, question)` is called in the order of the requests.
 */
export class Newest {
  constructor(ask, deliver, fail) {
    Object.assign(this, { ask, deliver, fail });
    this.next = null;
    this.running = false;
  }

  request(question) {
    this.next = question;
    if (!this.running) this.#run();
  }

  async #run() {
    this.running = true;
    while (this.next) {
      const question = this.next;
      this.next = null;
      try {
        this.deliver(await this.ask(question), question);
      } catch (error) {
        this.fail(error, question);
      }
    }
    this.running = false;
  }
}
