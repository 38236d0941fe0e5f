//! Advice on errors of XenServer and XCP-ng pools.

use holdfast_engine::XenBackupError;
use holdfast_host::xapi::XapiError;

use super::Advice;
use super::advice;
use crate::errors::Kind;
use crate::exit::Exit;

pub(super) fn xen_advice(error: &XenBackupError) -> Advice {
    match error {
        XenBackupError::Pool(error) => pool_advice(error),
        XenBackupError::Name { .. } => advice(Exit::Error, Kind::BadName, "choose a name by --machine NAME"),
        XenBackupError::NoWay { .. } => advice(
            Exit::Error,
            Kind::Unsupported,
            "--pool-read vhd reads them without NBD, which needs access to a port of the host",
        ),
        _ => advice(
            Exit::Error,
            Kind::Io,
            "the machine may have been changed at the same time: try again",
        ),
    }
}

fn pool_advice(error: &XapiError) -> Advice {
    match error {
        XapiError::Address { .. } => advice(
            Exit::Usage,
            Kind::Usage,
            "pools are named xen://HOST, and machines xen://HOST/NAME; a user other than root is before the host: xen://backup@HOST/NAME",
        ),
        XapiError::Trust { .. } => advice(
            Exit::Usage,
            Kind::Usage,
            "openssl x509 -noout -fingerprint -sha256 -in /etc/xensource/xapi-ssl.pem prints the fingerprint on the host",
        ),
        XapiError::Untrusted { .. } => advice(
            Exit::Error,
            Kind::Refused,
            "compare it with the output of openssl x509 -noout -fingerprint -sha256 -in /etc/xensource/xapi-ssl.pem on that host; if they are equal, trust it by --pool-certificate",
        ),
        XapiError::Connect { .. } => advice(
            Exit::Error,
            Kind::Io,
            "check the address: it is that of the pool's master, or of any host of the pool, and its HTTPS port must be accessible from here",
        ),
        XapiError::Broken { .. } => advice(
            Exit::Error,
            Kind::Io,
            "the network or the toolstack of the host may have been interrupted: try again",
        ),
        XapiError::Login { .. } => advice(
            Exit::Error,
            Kind::Permission,
            "check the user in the address and the password; a separate user with the role vm-power-admin is sufficient",
        ),
        XapiError::NoMachine { .. } => advice(
            Exit::Error,
            Kind::NotFound,
            "holdfast machines xen://HOST lists the machines of a pool",
        ),
        XapiError::SeveralMachines { .. } => advice(Exit::Error, Kind::Usage, "name it by its UUID"),
        XapiError::NoStorage { .. } => advice(
            Exit::Error,
            Kind::NotFound,
            "name one after the pool: xen://HOST/STORAGE",
        ),
        XapiError::Refused { code, .. } if code == "SR_BACKEND_FAILURE_44" || code == "SR_FULL" => advice(
            Exit::Error,
            Kind::NoSpace,
            "free space in the storage repository, or name another one",
        ),
        XapiError::Refused { code, .. } if code == "RBAC_PERMISSION_DENIED" => advice(
            Exit::Error,
            Kind::Permission,
            "assign the user the role vm-power-admin, or pool-operator to change which disks are tracked",
        ),
        XapiError::Refused { code, .. } if code == "OTHER_OPERATION_IN_PROGRESS" || code == "VDI_IN_USE" => {
            advice(Exit::Locked, Kind::Locked, "try again when it has ended")
        }
        XapiError::Refused { code, .. } if code == "SESSION_INVALID" => advice(
            Exit::Error,
            Kind::Io,
            "the pool ended the session repeatedly, as it does while its toolstack restarts: try again in a moment",
        ),
        _ => advice(
            Exit::Error,
            Kind::Io,
            "the log of the host (/var/log/xensource.log) has details",
        ),
    }
}
