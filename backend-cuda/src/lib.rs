//! The cuda backend of selkie.
