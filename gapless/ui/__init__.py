"""The files of the live page and of reports: plain HTML, CSS and JavaScript, no build step, no outside address."""
