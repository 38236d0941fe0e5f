//! The jobs of Holdfast as stories.
