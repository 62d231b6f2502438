//! What a model remembers between steps: page groups of keys and values, and recurrent state slots.
//!
//! Only descriptions live here. The engine decides which page or slot a sequence owns; a backend owns the bytes.
//!
//! A page holds [`PAGE`] tokens of one layer. Layer memory is `[page][n_kv][PAGE][d]` for keys and again for values, so
//! that one head's rows within a page are contiguous. Page 0 is never owned by a sequence: padding writes go there.

use hanzo_gguf::Format;

/// Tokens in a page.
pub const PAGE: usize = 32;

/// The formats a cache may be stored in.
pub const CACHE_FORMATS: [Format; 5] = [Format::F16, Format::F32, Format::BF16, Format::Q8_0, Format::Q4_0];

/// Layers whose caches share a row layout, formats, window and block table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheGroup {
    /// What it is, for people.
    pub name: String,
    /// Layers that own rows in it.
    pub layers: usize,
    /// Key/value heads.
    pub n_kv: usize,
    /// Elements of a key row of one head.
    pub d_k: usize,
    /// Elements of a value row of one head; 0 when values are part of the key rows (MLA).
    pub d_v: usize,
    /// Format of the keys.
    pub type_k: Format,
    /// Format of the values.
    pub type_v: Format,
    /// Pages wholly older than this many tokens may be freed.
    pub window: Option<u32>,
}

impl CacheGroup {
    /// Bytes of one key row of one head, or `None` if `d_k` is not a whole number of blocks.
    pub fn k_row_bytes(&self) -> Option<usize> {
        self.type_k.row_bytes(self.d_k)
    }

    /// Bytes of one value row of one head.
    pub fn v_row_bytes(&self) -> Option<usize> {
        self.type_v.row_bytes(self.d_v)
    }

    /// Bytes of one page over all layers, keys and values.
    pub fn page_bytes(&self) -> usize {
        let row = self.k_row_bytes().unwrap_or(0) + self.v_row_bytes().unwrap_or(0);
        self.layers * self.n_kv * PAGE * row
    }
}

/// A kind of recurrent state: one f32 array a layer and slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// What it is, for people.
    pub name: String,
    /// Layers that own one.
    pub layers: usize,
    /// f32 elements of one layer's state for one sequence.
    pub elements: usize,
}
