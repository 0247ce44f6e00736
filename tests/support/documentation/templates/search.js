"use strict";
// Searches window.graphoptIndex, a list of [title, kind, address, text]: every word has to occur; titles count most.
(function () {
    const box = document.getElementById("finder");
    const list = document.getElementById("found");
    const count = document.getElementById("found-count");
    const MOST = 40;

    function score(entry, words) {
        const title = entry[0].toLowerCase(), text = entry[3].toLowerCase();
        let total = 0;
        for (const word of words) {
            const last = title.split(".").pop();
            if (title === word || last === word) total += 100;
            else if (title.startsWith(word) || last.startsWith(word)) total += 40;
            else if (title.includes(word)) total += 20;
            else if (text.includes(word)) total += 1 + Math.min(5, text.split(word).length - 1);
            else return 0;
        }
        return total;
    }

    function find(query) {
        const words = query.toLowerCase().split(/\s+/).filter(Boolean);
        if (!words.length) return [];
        return window.graphoptIndex
            .map((entry) => ({entry, score: score(entry, words)}))
            .filter((found) => found.score > 0)
            .sort((one, other) => other.score - one.score || one.entry[0].length - other.entry[0].length)
            .map((found) => found.entry);
    }

    function excerpt(text, word) {
        const at = Math.max(0, text.toLowerCase().indexOf(word) - 40);
        return (at ? "…" : "") + text.slice(at, at + 110) + (at + 110 < text.length ? "…" : "");
    }

    function row(entry, word) {
        const item = document.createElement("li"), link = document.createElement("a");
        const kind = document.createElement("small");
        link.href = box.dataset.root + entry[2];
        link.textContent = entry[0];
        kind.textContent = `${entry[1]}: ${excerpt(entry[3], word)}`;
        link.append(kind);
        item.append(link);
        return item;
    }

    function show() {
        const query = box.value.trim();
        const found = find(query);
        list.replaceChildren(...found.slice(0, MOST).map((entry) => row(entry, query.toLowerCase().split(/\s+/)[0])));
        list.hidden = !found.length;
        count.textContent = !query ? "" : found.length ? `${found.length} found` : `nothing is found for “${query}”`;
    }

    function move(step) {
        const links = [...list.querySelectorAll("a")];
        const next = links.indexOf(document.activeElement) + step;
        (next < 0 ? box : links[Math.min(next, links.length - 1)] || box).focus();
    }

    box.addEventListener("input", show);
    document.addEventListener("keydown", (event) => {
        const typing = /^(input|textarea)$/i.test(document.activeElement.tagName);
        const inside = document.activeElement === box || list.contains(document.activeElement);
        if (event.key === "/" && !typing) box.focus();
        else if (inside && event.key === "ArrowDown") move(1);
        else if (inside && event.key === "ArrowUp") move(-1);
        else if (inside && event.key === "Escape") { box.value = ""; show(); box.focus(); }
        else if (event.key === "Enter" && document.activeElement === box) (list.querySelector("a") || box).click();
        else return;
        event.preventDefault();
    });
    box.addEventListener("keydown", (event) => event.key === "Enter" && event.preventDefault());
    show();
})();
