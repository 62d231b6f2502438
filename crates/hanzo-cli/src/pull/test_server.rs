//! An HTTP server for tests: one file on 127.0.0.1, with ranges, and faults in the order they are queued.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// What goes wrong with one request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// An answer with this status and no file.
    Status(u16),
    /// The connection closes after so many bytes of the body.
    CutAfter(usize),
    /// A redirect to this location.
    Redirect(String),
    /// The body arrives in chunks of this many bytes, with a pause before each.
    Slow(usize, Duration),
    /// Ranges are ignored: the whole file with status 200.
    NoRange,
}

/// A request as it was seen.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The path with its query.
    pub path: String,
    /// Header lines, lower-case names.
    pub headers: Vec<(String, String)>,
}

impl Seen {
    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
    }
}

#[derive(Default)]
struct Shared {
    files: Vec<(String, Vec<u8>, String)>,
    faults: VecDeque<Fault>,
    seen: Vec<Seen>,
}

/// The running server. Its threads end with the test process.
pub struct Server {
    /// `http://127.0.0.1:PORT`
    pub base: String,
    shared: Arc<Mutex<Shared>>,
}

impl Server {
    /// Starts on a free port.
    pub fn start() -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::new(Mutex::new(Shared::default()));
        let for_threads = shared.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let shared = for_threads.clone();
                // A client that goes away early is part of the tests.
                std::thread::spawn(move || drop(serve(stream, &shared)));
            }
        });
        Server { base, shared }
    }

    /// Serves `body` at `path` with this ETag (empty for none), replacing what was there.
    pub fn put(&self, path: &str, body: impl Into<Vec<u8>>, etag: &str) {
        let mut shared = self.shared.lock().unwrap();
        shared.files.retain(|(p, _, _)| p != path);
        shared.files.push((path.into(), body.into(), etag.into()));
    }

    /// Queues a fault for the next request that has none yet.
    pub fn fault(&self, fault: Fault) {
        self.shared.lock().unwrap().faults.push_back(fault);
    }

    /// All requests so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.shared.lock().unwrap().seen.clone()
    }
}

fn serve(mut stream: TcpStream, shared: &Mutex<Shared>) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
            break;
        }
        lines.push(line.trim().to_string());
    }
    let path = lines.first().and_then(|l| l.split(' ').nth(1)).unwrap_or_default().to_string();
    let headers = lines.iter().skip(1).filter_map(|l| l.split_once(':'));
    let headers = headers.map(|(n, v)| (n.to_lowercase(), v.trim().to_string())).collect();
    let seen = Seen { path, headers };
    let (file, fault) = {
        let mut shared = shared.lock().unwrap();
        shared.seen.push(seen.clone());
        let bare = seen.path.split('?').next().unwrap_or_default();
        let file = shared.files.iter().find(|(p, _, _)| p == bare).map(|(_, b, e)| (b.clone(), e.clone()));
        (file, shared.faults.pop_front())
    };
    let refuse = |stream: &mut TcpStream, status: u16, extra: &str| {
        write!(stream, "HTTP/1.1 {status} X\r\n{extra}Content-Length: 0\r\nConnection: close\r\n\r\n")
    };
    match &fault {
        Some(Fault::Status(status)) => return refuse(&mut stream, *status, ""),
        Some(Fault::Redirect(to)) => return refuse(&mut stream, 302, &format!("Location: {to}\r\n")),
        _ => {}
    }
    let Some((body, etag)) = file else { return refuse(&mut stream, 404, "") };
    let asked = seen.header("range").and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    let same = seen.header("if-range").is_none_or(|v| v == etag);
    let from = asked.filter(|_| same && !matches!(fault, Some(Fault::NoRange)));
    if from.is_some_and(|f| f >= body.len()) {
        return refuse(&mut stream, 416, &format!("Content-Range: bytes */{}\r\n", body.len()));
    }
    let start = from.unwrap_or(0);
    let status = if from.is_some() { "206 Partial Content" } else { "200 OK" };
    write!(stream, "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n", body.len() - start)?;
    if !etag.is_empty() {
        write!(stream, "ETag: {etag}\r\n")?;
    }
    if from.is_some() {
        write!(stream, "Content-Range: bytes {start}-{}/{}\r\n", body.len() - 1, body.len())?;
    }
    write!(stream, "\r\n")?;
    let rest = &body[start..];
    match fault {
        Some(Fault::CutAfter(n)) => stream.write_all(&rest[..n.min(rest.len())]),
        Some(Fault::Slow(chunk, pause)) => rest.chunks(chunk).try_for_each(|c| {
            std::thread::sleep(pause);
            stream.write_all(c)?;
            stream.flush()
        }),
        _ => stream.write_all(rest),
    }
}
