// Browsers start no worker from a page that was opened from the disk. The search runs in a hidden frame instead.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      this.inside = frame.contentWindow;
      window.addEventListener("message", (event) => {
        if (event.source !== this.inside) return;
        const message = new MessageEvent("message", { data: event.data });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      });
      const page = this.inside.document;
      page.open();
      // What the search calls as in a worker: it answers to the page, and loads the stemmers of other languages.
      page.write(`<body><script>
        postMessage = (data) => parent.postMessage(data, "*");
        importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done) => {
          const script = document.createElement("script");
          script.src = url;
          script.onload = done;
          document.body.appendChild(script);
        })), Promise.resolve());
      </script><script src="${url}"></script></body>`);
      page.close();
      this.ready = new Promise((done) => { this.inside.onload = done; });
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker;
}
