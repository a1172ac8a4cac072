//! selkie in a web page.
