//! One file over HTTP into a `.part` file: resumed, retried, hashed on the way. Knows nothing of hubs or caches.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use sha2::{Digest, Sha256};
use ureq::http::{HeaderMap, Response, StatusCode, header};
use ureq::{Agent, Body, Error as HttpError};

use super::cache;
use super::partial::{self, Partial};
use crate::failure::Failure;
use crate::progress::Progress;

/// Attempts in a row that may pass without a new byte.
const ATTEMPTS: u32 = 5;
/// Wait before the first retry; doubles each time.
pub const FIRST_WAIT: Duration = Duration::from_millis(500);
/// No wait is longer than this, whatever the server asks for.
const LONGEST_WAIT: Duration = Duration::from_secs(30);
/// Silence after which a connection is given up (and resumed).
const SILENCE: Duration = Duration::from_secs(60);

/// An HTTP client with our timeouts, the environment's proxy, and no transparent compression.
pub struct Client {
    agent: Agent,
    token: Option<String>,
    token_host: String,
    first_wait: Duration,
}

/// What to fetch and what it must be.
pub struct Request<'a> {
    /// The URL.
    pub url: &'a str,
    /// The whole file's SHA-256, if known beforehand.
    pub sha256: Option<&'a str>,
    /// The whole file's size, if known beforehand.
    pub bytes: Option<u64>,
}

/// Why an attempt ended without the whole file.
enum Interruption {
    /// Trying again may help; the server may have said when.
    Transient(anyhow::Error, Option<Duration>),
    /// Trying again cannot help.
    Permanent(anyhow::Error),
}

impl Client {
    /// A client that sends `token` to `hub` only.
    ///
    /// # Errors
    /// When the file of certificate authorities cannot be used.
    pub fn new(
        hub: &str,
        token: Option<String>,
        certificates: Option<&Path>,
        first_wait: Duration,
    ) -> anyhow::Result<Client> {
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            .user_agent(concat!("hanzo/", env!("CARGO_PKG_VERSION")))
            // A range of a compressed stream is not a range of the file.
            .accept_encoding("identity")
            .timeout_resolve(Some(Duration::from_secs(30)))
            .timeout_connect(Some(Duration::from_secs(30)))
            .timeout_recv_response(Some(SILENCE))
            .timeout_per_read(Some(SILENCE));
        if let Some(path) = certificates {
            config = config.tls_config(trust(path)?);
        }
        let agent = config.build().new_agent();
        Ok(Client { agent, token, token_host: format!("{hub}/"), first_wait })
    }

    /// Reads a small JSON document, retrying; `Ok(Err(status))` for a status that is not success.
    pub fn json(&self, url: &str) -> anyhow::Result<Result<(serde_json::Value, HeaderMap), StatusCode>> {
        self.retrying(url, |attempt| {
            let mut response = self.get(url, &[]).map_err(|e| classify(e, url))?;
            let status = response.status();
            if !status.is_success() {
                let last = attempt + 1 >= ATTEMPTS;
                return if is_transient(status) && !last { Err(status_error(&response, url)) } else { Ok(Err(status)) };
            }
            let text = response.body_mut().read_to_string().map_err(|e| classify(e, url))?;
            let value = serde_json::from_str(&text)
                .map_err(|e| Interruption::Permanent(anyhow::Error::new(e).context(format!("{url}: not JSON"))))?;
            Ok(Ok((value, response.headers().clone())))
        })
    }

    /// Fetches the request's file into `partial`, continuing what is there. Returns the SHA-256 of the whole.
    ///
    /// On an error, what has arrived stays for the next time, unless it is known to be wrong.
    pub fn fetch(&self, request: &Request, partial: &Partial, progress: &Progress) -> anyhow::Result<String> {
        let resumed = partial.state()?.is_some();
        let sha256 = self.fetch_unchecked(request, partial, progress)?;
        match request.sha256 {
            Some(wanted) if wanted != sha256 => {
                partial.discard()?;
                if resumed {
                    // The old beginning may be to blame: once more, from the start.
                    let again = self.fetch_unchecked(request, partial, progress)?;
                    if again == wanted {
                        return Ok(again);
                    }
                    partial.discard()?;
                }
                Err(Failure::new(format!("{}: the file's SHA-256 is {sha256}, not {wanted}", request.url))
                    .remedy("the server (or a proxy) gives another file: try again later, or get it from elsewhere")
                    .into())
            }
            _ => Ok(sha256),
        }
    }

    fn fetch_unchecked(&self, request: &Request, partial: &Partial, progress: &Progress) -> anyhow::Result<String> {
        let mut best = 0;
        let mut fruitless = 0;
        loop {
            let error = match self.attempt(request, partial, progress) {
                Ok(sha256) => return Ok(sha256),
                Err(Interruption::Permanent(error)) => return Err(error),
                Err(Interruption::Transient(error, wait)) => (error, wait),
            };
            let have = partial.len();
            fruitless = if have > best { 1 } else { fruitless + 1 };
            best = best.max(have);
            if fruitless >= ATTEMPTS {
                return Err(error.0.context(format!("{}: gave up after {ATTEMPTS} attempts", request.url)));
            }
            std::thread::sleep(self.wait(fruitless - 1, error.1));
        }
    }

    /// One request and its body.
    fn attempt(&self, request: &Request, partial: &Partial, progress: &Progress) -> Result<String, Interruption> {
        let url = request.url;
        let mut have = partial.resumable(url, request.sha256).map_err(Interruption::Permanent)?;
        if let Some(state) = &have
            && state.total.or(request.bytes).is_some_and(|total| total == state.len)
            && request.sha256.is_some()
        {
            let (_, sha256) = cache::hash_file(partial.path()).map_err(Interruption::Permanent)?;
            return Ok(sha256);
        }
        let mut headers = Vec::new();
        if let Some(state) = &have {
            headers.push((header::RANGE, format!("bytes={}-", state.len)));
            if let Some(validator) = &state.validator {
                headers.push((header::IF_RANGE, validator.clone()));
            }
        }
        let response = self.get(url, &headers).map_err(|e| classify(e, url))?;
        let total = match response.status() {
            StatusCode::PARTIAL_CONTENT => {
                let start = have.as_ref().map_or(0, |s| s.len);
                match content_range(response.headers()) {
                    Some((from, total)) if from == start && have.is_some() => total,
                    _ => {
                        partial.discard().map_err(Interruption::Permanent)?;
                        return Err(transient(format!("{url}: the server sent another range than asked for")));
                    }
                }
            }
            StatusCode::OK => {
                have = None;
                content_length(response.headers())
            }
            StatusCode::RANGE_NOT_SATISFIABLE if have.is_some() => {
                // Either all is there already and its hash decides, or the file changed: from the start.
                partial.discard().map_err(Interruption::Permanent)?;
                return Err(transient(format!("{url}: the server has no such range")));
            }
            _ => return Err(status_error(&response, url)),
        };
        if let (Some(expected), Some(total)) = (request.bytes, total)
            && expected != total
        {
            let message = format!("{url}: the server offers {total} bytes, not {expected}");
            let failure = Failure::new(message).remedy("the file there is another one: get it from elsewhere");
            return Err(Interruption::Permanent(failure.into()));
        }
        let start = have.as_ref().map_or(0, |s| s.len);
        if let Some(total) = total {
            partial.check_space(total.saturating_sub(start)).map_err(Interruption::Permanent)?;
        }
        let validator = validator(response.headers());
        let state = partial::State { source: url.into(), validator, total, wheels: (0, 0) };
        let file = partial.open_at(start, &state).map_err(Interruption::Permanent)?;
        receive(response, file, partial.path().to_path_buf(), start, total, progress, url)
    }

    fn get(&self, url: &str, headers: &[(header::HeaderName, String)]) -> Result<Response<Body>, HttpError> {
        let mut builder = self.agent.get(url);
        for (name, value) in headers {
            builder = builder.header(name, value);
        }
        // A redirect to another host drops the header again (ureq's default).
        if let Some(token) = self.token.as_ref().filter(|_| url.starts_with(&self.token_host)) {
            builder = builder.header(header::AUTHORIZATION, format!("Bearer {token}"));
        }
        builder.call()
    }

    fn retrying<T>(&self, url: &str, mut attempt: impl FnMut(u32) -> Result<T, Interruption>) -> anyhow::Result<T> {
        let mut n = 0;
        loop {
            match attempt(n) {
                Ok(value) => return Ok(value),
                Err(Interruption::Permanent(error)) => return Err(error),
                Err(Interruption::Transient(error, wait)) => {
                    n += 1;
                    if n >= ATTEMPTS {
                        return Err(error.context(format!("{url}: gave up after {ATTEMPTS} attempts")));
                    }
                    std::thread::sleep(self.wait(n - 1, wait));
                }
            }
        }
    }

    fn wait(&self, retry: u32, asked: Option<Duration>) -> Duration {
        asked.unwrap_or(self.first_wait.saturating_mul(1 << retry.min(10))).min(LONGEST_WAIT)
    }
}

/// Appends a body to `file` from `start` on, hashing from the very beginning.
fn receive(
    response: Response<Body>,
    mut file: File,
    path: PathBuf,
    start: u64,
    total: Option<u64>,
    progress: &Progress,
    url: &str,
) -> Result<String, Interruption> {
    let mut hasher = Sha256::new();
    if start > 0 {
        let hashed = cache::hash_into(&path, &mut hasher)
            .with_context(|| format!("cannot read `{}`", path.display()))
            .map_err(Interruption::Permanent)?;
        if hashed != start {
            return Err(transient(format!("`{}` changed while it was read", path.display())));
        }
    }
    file.seek(SeekFrom::Start(start)).map_err(|e| disk(&path, e))?;
    progress.set(start);
    let mut body = response.into_body().into_reader();
    let mut buffer = vec![0; 1 << 18];
    let mut have = start;
    loop {
        let n = match body.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
            Err(e) => {
                return Err(Interruption::Transient(
                    anyhow::Error::new(e).context(format!("{url}: the connection broke after {have} bytes")),
                    None,
                ));
            }
        };
        file.write_all(&buffer[..n]).map_err(|e| disk(&path, e))?;
        hasher.update(&buffer[..n]);
        have += n as u64;
        progress.set(have);
    }
    if total.is_some_and(|total| have != total) {
        return Err(transient(format!("{url}: the body ended after {have} bytes")));
    }
    Ok(cache::hex(hasher))
}

fn transient(message: String) -> Interruption {
    Interruption::Transient(anyhow::Error::msg(message), None)
}

fn disk(path: &Path, error: io::Error) -> Interruption {
    Interruption::Permanent(cache::storage_failure(path, error).into())
}

fn is_transient(status: StatusCode) -> bool {
    status.is_server_error() || matches!(status, StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS)
}

fn status_error(response: &Response<Body>, url: &str) -> Interruption {
    let status = response.status();
    let failure = Failure::new(format!("{url}: the server answered {status}"));
    if is_transient(status) {
        let after = header_text(response.headers(), "retry-after").and_then(|v| v.trim().parse().ok());
        return Interruption::Transient(failure.remedy("try again later").into(), after.map(Duration::from_secs));
    }
    Interruption::Permanent(failure.remedy(status_remedy(status)).into())
}

/// What to do about a status that is not going to change by itself.
pub fn status_remedy(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            "the file needs permission: accept its terms on the hub and set HF_TOKEN to an access token"
        }
        StatusCode::NOT_FOUND | StatusCode::GONE => "there is no such file: check the spelling",
        StatusCode::PROXY_AUTHENTICATION_REQUIRED => "set HTTPS_PROXY with the proxy's user and password",
        _ => "check the URL, and whether a proxy answers in the server's place",
    }
}

fn classify(error: HttpError, url: &str) -> Interruption {
    let network = "check the network; behind a proxy set HTTPS_PROXY";
    let (remedy, retry) = match &error {
        HttpError::HostNotFound => (network, false),
        HttpError::Io(e) if e.kind() == io::ErrorKind::ConnectionRefused => (network, true),
        HttpError::Io(_) | HttpError::Timeout(_) | HttpError::Protocol(_) | HttpError::ConnectionFailed => {
            (network, true)
        }
        HttpError::BadUri(_) | HttpError::Http(_) => ("check the URL", false),
        HttpError::TooManyRedirects | HttpError::RedirectFailed => ("the server redirects in a circle", false),
        HttpError::Tls(_) | HttpError::Rustls(_) | HttpError::Pem(_) => {
            ("if a proxy uses its own certificate authority, set SSL_CERT_FILE to its PEM file", false)
        }
        HttpError::ConnectProxyFailed(_) | HttpError::InvalidProxyUrl => ("check HTTPS_PROXY and NO_PROXY", false),
        _ => (network, false),
    };
    let failure = Failure::new(format!("cannot fetch {url}")).because(error).remedy(remedy).into();
    if retry { Interruption::Transient(failure, None) } else { Interruption::Permanent(failure) }
}

fn trust(path: &Path) -> anyhow::Result<ureq::tls::TlsConfig> {
    let unusable = |cause: anyhow::Error| {
        Failure::new(format!("cannot use the certificates in `{}`", path.display()))
            .because(cause)
            .remedy("point SSL_CERT_FILE at a PEM file, or unset it to use the built-in authorities")
    };
    let pem = std::fs::read(path).map_err(|e| unusable(e.into()))?;
    let certificates: Vec<_> = ureq::tls::parse_pem(&pem)
        .filter_map(|item| match item {
            Ok(ureq::tls::PemItem::Certificate(c)) => Some(c),
            _ => None,
        })
        .collect();
    if certificates.is_empty() {
        return Err(unusable(anyhow::anyhow!("it holds no certificate")).into());
    }
    let roots = ureq::tls::RootCerts::from(certificates);
    Ok(ureq::tls::TlsConfig::builder().root_certs(roots).build())
}

fn header_text<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    headers.get(name).and_then(|v| v.to_str().ok())
}

fn content_length(headers: &HeaderMap) -> Option<u64> {
    header_text(headers, "content-length")?.trim().parse().ok()
}

/// `bytes FROM-TO/TOTAL` as (from, total).
fn content_range(headers: &HeaderMap) -> Option<(u64, Option<u64>)> {
    let (range, total) = header_text(headers, "content-range")?.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (from, _) = range.split_once('-')?;
    Some((from.trim().parse().ok()?, total.trim().parse().ok()))
}

/// What makes a resumed download safe: a strong ETag, else the time of the last change.
fn validator(headers: &HeaderMap) -> Option<String> {
    let etag = header_text(headers, "etag").filter(|e| !e.starts_with("W/") && e.starts_with('"'));
    etag.or_else(|| header_text(headers, "last-modified")).map(str::to_string)
}
