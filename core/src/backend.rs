//! The backend boundary.
