/* A browser starts no worker for a page that was opened from a file. Search then runs in a hidden frame instead. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      this.queue = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      const start = () => {
        document.body.appendChild(frame);
        const inside = frame.contentWindow;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inside.importScripts = () => {}; // languages other than English
        const code = inside.document.createElement("script");
        code.src = script;
        code.onload = () => { this.inside = inside; this.queue.splice(0).forEach((data) => this.postMessage(data)); };
        inside.document.body.appendChild(code);
      };
      document.body ? start() : addEventListener("DOMContentLoaded", start);
    }
    postMessage(data) {
      this.inside ? this.inside.dispatchEvent(new MessageEvent("message", { data })) : this.queue.push(data);
    }
    terminate() {}
  };
}
