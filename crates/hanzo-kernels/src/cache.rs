//! How a page of the key/value cache lies in device memory: the bytes of its rows in another order (see `prelude/cache.kc`),
//! so that kernels load aligned words and a wave that takes a row a lane reads whole lines.
//!
//! One head's page is 32 rows of `d` elements. Elements come in chunks of 8. What the rows mean is not known here.

use hanzo_gguf::Format;

/// Rows of a page.
const ROWS: usize = 32;

/// The order of a page's chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// `[chunk][row]`: a thread takes a row.
    Keys,
    /// `[row][chunk]`: a thread takes a chunk of every row.
    Values,
}

/// The order that values of `d` columns are kept in. Rows that are not whole chunks have the order of keys.
pub fn values_order(d: usize) -> Order {
    if d.is_multiple_of(8) { Order::Values } else { Order::Keys }
}

/// The number that kernels know a cache format by; none if no kernel reads rows of `d` elements of it.
pub fn code(format: Format, d: usize) -> Option<u32> {
    let (code, whole) = match format {
        Format::F32 => (0, 4),
        Format::F16 => (1, 4),
        Format::BF16 => (2, 4),
        Format::Q8_0 => (3, 32),
        Format::Q4_0 => (4, 32),
        _ => return None,
    };
    (d > 0 && d.is_multiple_of(whole)).then_some(code)
}

/// For each group of four bits of a page: where it is in the rows.
fn places(format: Format, d: usize, order: Order) -> Vec<usize> {
    let row_bytes = format.row_bytes(d).unwrap_or(0);
    let block = format.block_bytes();
    // Groups of four bits of an element, and whether blocks have a half scale.
    let (size, scaled) = match format {
        Format::F32 => (8, false),
        Format::Q8_0 => (2, true),
        Format::Q4_0 => (1, true),
        _ => (4, false),
    };
    let mut places = vec![0; 2 * ROWS * row_bytes];
    for r in 0..ROWS {
        for e in 0..d {
            let (chunk, i) = (e / 8, e % 8);
            let at = match order {
                Order::Values => r * d + e,
                Order::Keys if chunk < d / 8 => (chunk * ROWS + r) * 8 + i,
                Order::Keys => d / 8 * ROWS * 8 + r * 4 + i,
            };
            let from = match format {
                Format::Q8_0 => 2 * (r * row_bytes + e / 32 * block + 2 + e % 32),
                Format::Q4_0 => 2 * (r * row_bytes + e / 32 * block + 2 + e % 16) + e % 32 / 16,
                _ => 2 * r * row_bytes + e * size,
            };
            (0..size).for_each(|k| places[at * size + k] = from + k);
        }
        for b in (0..d / 32).filter(|_| scaled) {
            let at = ROWS * d * size + 4 * (r * (d / 32) + b);
            (0..4).for_each(|k| places[at + k] = 2 * (r * row_bytes + b * block) + k);
        }
    }
    places
}

fn get(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (4 * (i % 2)) & 15
}

fn put(bytes: &mut [u8], i: usize, x: u8) {
    bytes[i / 2] |= x << (4 * (i % 2));
}

/// Rows `[heads][32][d]` in GGUF bytes, from pages of as many heads in device memory.
///
/// # Panics
/// If `pages` is not whole pages.
pub fn to_rows(format: Format, d: usize, order: Order, pages: &[u8]) -> Vec<u8> {
    let places = places(format, d, order);
    assert!(pages.len().is_multiple_of(places.len() / 2), "whole pages");
    let mut rows = vec![0; pages.len()];
    for (page, rows) in pages.chunks(places.len() / 2).zip(rows.chunks_mut(places.len() / 2)) {
        places.iter().enumerate().for_each(|(i, p)| put(rows, *p, get(page, i)));
    }
    rows
}

/// Undoes [`to_rows`].
///
/// # Panics
/// If `rows` are not whole pages.
pub fn from_rows(format: Format, d: usize, order: Order, rows: &[u8]) -> Vec<u8> {
    let places = places(format, d, order);
    assert!(rows.len().is_multiple_of(places.len() / 2), "whole pages");
    let mut pages = vec![0; rows.len()];
    for (page, rows) in pages.chunks_mut(places.len() / 2).zip(rows.chunks(places.len() / 2)) {
        places.iter().enumerate().for_each(|(i, p)| put(page, i, get(rows, *p)));
    }
    pages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_holds_every_bit_of_its_rows_once() {
        for (format, dims) in [
            (Format::F32, &[4, 8, 20, 128][..]),
            (Format::F16, &[12, 64, 576]),
            (Format::BF16, &[8, 100]),
            (Format::Q8_0, &[32, 96, 128]),
            (Format::Q4_0, &[32, 64, 160]),
        ] {
            for &d in dims {
                for order in [Order::Keys, Order::Values] {
                    let mut p = places(format, d, order);
                    p.sort_unstable();
                    assert!(p.iter().enumerate().all(|(i, p)| i == *p), "{format} {d} {order:?}");
                    let rows: Vec<u8> = (0..2 * p.len() / 2).map(|i| (i * 37 + i / 256) as u8).collect();
                    let pages = from_rows(format, d, order, &rows);
                    assert!(to_rows(format, d, order, &pages) == rows, "{format} {d} {order:?}");
                }
            }
        }
    }
}
